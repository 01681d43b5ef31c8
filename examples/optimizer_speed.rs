//! Time of an update with FP32 and with 8-bit moments.
//!
//!     cargo run --release --example optimizer_speed -- [TRAINABLES]
//!
//! Prints ns per trainable, clipping included, of the fastest of ten updates, and bytes of moments.

use std::{env, time::Instant};

use engraft::{
    device::{
        Buffer,
        arena::{Arenas, Placement, TableRow},
    },
    error::Result,
    optim::{AdamWOptions, Optimizer, OptimizerKind},
};
use engraft_adapters::Segment;
use engraft_util::rng;

fn main() -> Result<()> {
    let len: usize = env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10_000_000);
    // Tensors of the size of a LoRA of rank 64 on a matrix of 768 x 768.
    let segments: Vec<usize> = (0..len).step_by(49_152).map(|start| 49_152.min(len - start)).collect();
    let normal = |stream: u64| {
        let key = rng::key(&[stream]);
        Buffer::from_slice(&(0..len as u64).map(|at| rng::normal(key, at)).collect::<Vec<f32>>())
    };
    let mut gradient = normal(1)?;
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
        let mut values = normal(2)?;
        let mut arenas = Arenas::real(None);
        let options = AdamWOptions::default();
        let mut optimizer =
            Optimizer::new(kind, &Segment::of(&segments), options, Placement::Memory, &mut arenas)?;
        let bytes: usize = arenas.rows().iter().map(TableRow::bytes).sum();
        let mut fastest = f64::INFINITY;
        for _ in 0..10 {
            let start = Instant::now();
            optimizer.update(values.view_mut(), gradient.view_mut(), 1e-3, 1.0, 1.0);
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        println!("{}: {:.2} ns a trainable, {bytes} bytes", kind.name(), fastest * 1e9 / len as f64);
    }
    Ok(())
}
