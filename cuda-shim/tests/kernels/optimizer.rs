//! Norm and finite check, AdamW with FP32 and with 8-bit moments.

use cuda_shim::kernels;
use engraft::kernels::{
    adamw::{self, Update},
    adamw8,
};

use crate::{args, harness::*};

kernels!(square_sum_parts_launch, square_sum_finish_launch, adamw_launch, adamw8_launch);

/// The struct that the kernels take.
#[repr(C)]
#[derive(Clone, Copy)]
struct Factors {
    betas: [f32; 2],
    complements: [f32; 2],
    step_size: f32,
    root: f32,
    keep: f32,
    epsilon: f32,
}

impl Factors {
    fn new(u: Update) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(u.step as f64);
        Self {
            betas: [u.betas.0 as f32, u.betas.1 as f32],
            complements: [(1.0 - u.betas.0) as f32, (1.0 - u.betas.1) as f32],
            step_size: (u.lr / correction(u.betas.0)) as f32,
            root: (1.0 / correction(u.betas.1).sqrt()) as f32,
            keep: (1.0 - u.lr * u.weight_decay) as f32,
            epsilon: u.epsilon as f32,
        }
    }
}

/// The result of `square_sum_finish`, 24 bytes.
struct Control(Device<u32>);

impl Control {
    fn of(gradient: &Device<f32>, count: usize, loss_scale: f32, clip: f64) -> Self {
        let pieces = count.div_ceil(1 << 15);
        let (parts, control) = (Device::<f64>::poisoned(pieces), Device::<u32>::poisoned(6));
        run(
            square_sum_parts_launch,
            [pieces, 1, 1],
            256,
            0,
            1,
            args![gradient.head(), count as i64, parts.head()],
        );
        let args = args![parts.head(), pieces as i32, loss_scale, clip, control.head()];
        run(square_sum_finish_launch, [1, 1, 1], 256, 0, 1, args);
        Self(control)
    }

    fn square_sum(&self) -> f64 {
        let words = self.0.get();
        f64::from_bits(u64::from(words[0]) | u64::from(words[1]) << 32)
    }

    fn float(&self, at: usize) -> f64 {
        f64::from(f32::from_bits(self.0.get()[at]))
    }

    fn skip(&self) -> bool {
        self.0.get()[4] != 0
    }
}

const OPTIONS: Update =
    Update { step: 3, lr: 1e-2, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.1, factor: 1.0 };

#[test]
fn the_norm_clips_unscales_and_finds_what_is_not_finite() {
    for (count, loss_scale, clip) in [(1, 1.0, 0.0), (70_001, 8.0, 0.5), (40_000, 1024.0, 1e9)] {
        let values = rounded::<f32>(1, count);
        let norm = values.iter().map(|x| x * x).sum::<f64>().sqrt() / f64::from(loss_scale);
        let factor = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 } / f64::from(loss_scale);
        let control = Control::of(&Device::of(&values), count, loss_scale, clip);
        assert!((control.square_sum() / (norm * norm) - 1.0).abs() < 1e-12);
        assert!(
            (control.float(2) / norm - 1.0).abs() < 1e-6 && (control.float(3) / factor - 1.0).abs() < 1e-6
        );
        assert!(!control.skip());
        for bad in [f64::NAN, f64::INFINITY] {
            let mut values = values.clone();
            values[count - 1] = bad;
            assert!(Control::of(&Device::of(&values), count, loss_scale, clip).skip());
        }
    }
    // The square of the largest float is finite in f64.
    assert!(!Control::of(&Device::of(&[f64::from(f32::MAX)]), 1, 1.0, 0.0).skip());
}

#[test]
fn adamw_matches_its_twin_and_skips() {
    for (count, shift) in [(1, 0), (2051, 0), (2051, 3)] {
        let [values, first, gradient] = [1, 2, 4].map(|seed| rounded::<f32>(seed, count));
        let second: Vec<f64> = rounded::<f32>(3, count).iter().map(|x| x.abs()).collect();
        let (w, g) = (Device::<f32>::of(&values), Device::<f32>::of(&gradient));
        let (m, v) = (Device::<f32>::of(&first), Device::<f32>::of(&second));
        let (loss_scale, len) = (4.0, count - shift);
        let launch = |control: &Control| {
            let (w, g, m, v) = (w.at(shift), g.at(shift), m.at(shift), v.at(shift));
            let args = args![w, g, m, v, len as i64, Factors::new(OPTIONS), control.0.head()];
            run(adamw_launch, [len.div_ceil(1024), 1, 1], 256, 0, 1, args);
        };
        launch(&Control::of(&Device::of(&[f64::NAN]), 1, 1.0, 0.0));
        assert_eq!((w.wide(), m.wide(), v.wide()), (values.clone(), first.clone(), second.clone()));
        let control = Control::of(&g, count, loss_scale, 0.0);
        launch(&control);
        let (mut expected, mut one, mut two) = (values, first, second);
        let update = Update { factor: 1.0 / f64::from(loss_scale), ..OPTIONS };
        adamw::reference::update(
            &mut expected[shift..],
            &gradient[shift..],
            &mut one[shift..],
            &mut two[shift..],
            update,
        );
        assert_close(&w.wide(), &expected, 1e-6, "values");
        assert_close(&m.wide(), &one, 1e-6, "first moments");
        assert_close(&v.wide(), &two, 1e-6, "second moments");
    }
}

/// Each step begins with the kernel's state, so that a code that differs does not spread.
#[test]
fn adamw8_matches_its_twin() {
    let books: Vec<f64> = [true, false].into_iter().flat_map(adamw8::reference::book::<f64>).collect();
    let books = Device::<f32>::of(&books);
    for count in [1usize, 255, 256, 257, 1500] {
        let blocks = count.div_ceil(256);
        let w = Device::<f32>::of(&rounded::<f32>(1, count));
        let codes = [(); 2].map(|()| Device::<u8>::of(&vec![0.0; count]));
        let scales = [(); 2].map(|()| Device::<f32>::of(&vec![0.0; blocks]));
        for step in 1..=4 {
            let gradient: Vec<f64> =
                rounded::<f32>(10 + step, count).iter().map(|x| f64::from(x.powi(5) as f32)).collect();
            let g = Device::<f32>::of(&gradient);
            let u = Update { step, factor: 0.25, ..OPTIONS };
            let control = Control::of(&g, count, 4.0, 0.0);
            let mut wide = w.wide();
            let mut twin_codes = [codes[0].get(), codes[1].get()];
            let mut twin_scales = [scales[0].wide(), scales[1].wide()];
            {
                let ([m, v], [m_scales, v_scales]) = (&mut twin_codes, &mut twin_scales);
                let m = adamw8::reference::Coded { codes: m, scales: m_scales };
                let v = adamw8::reference::Coded { codes: v, scales: v_scales };
                adamw8::reference::update(&mut wide, &gradient, m, v, u);
            }
            let (m, v) = ((codes[0].head(), scales[0].head()), (codes[1].head(), scales[1].head()));
            let (factors, at) = (Factors::new(u), control.0.head());
            let args = args![w.head(), g.head(), m.0, m.1, v.0, v.1, count as i64, factors, at, books.head()];
            run(adamw8_launch, [blocks, 1, 1], 256, 0, step, args);
            assert_close(&w.wide(), &wide, 1e-6, "values");
            for at in 0..2 {
                assert_close(&scales[at].wide(), &twin_scales[at], 1e-6, "scales");
                let found = codes[at].get();
                let differing = found.iter().zip(&twin_codes[at]).filter(|(a, b)| a != b).count();
                assert!(found.iter().zip(&twin_codes[at]).all(|(a, b)| a.abs_diff(*b) <= 1));
                assert!(differing * 200 <= count, "{differing} of {count} codes differ");
            }
        }
    }
}
