//! Central differences of the REFERENCE twin, then the CPU side against it in chunks.

use super::*;
use crate::testing::*;

#[test]
fn reference_gradient_is_central_differences() {
    let (hidden, head, targets) = (doubles(1, 4 * 5), doubles(2, 11 * 5), [3, 0, 10, 3]);
    for smoothing in [0.0, 0.2] {
        let (_, gradient) = reference::forward_backward(&hidden, &targets, &head, 5, smoothing);
        assert_gradient(&hidden, &gradient, "hidden", |hidden| {
            reference::forward_backward(hidden, &targets, &head, 5, smoothing).0.iter().sum()
        });
    }
}

#[test]
fn cpu_matches_reference_whatever_the_chunk() {
    let (n, c, v) = (23, 7, 61);
    let (hidden, head) = (numbers(1, n * c), f16_numbers(2, v * c));
    let rows: Vec<u32> = (0..n as u32).filter(|row| row % 3 != 1).collect();
    let targets: Vec<i32> = rows.iter().map(|row| (row * 17 % 61) as i32).collect();
    let m = rows.len();
    let supervised: Vec<f64> =
        rows.iter().flat_map(|&row| widened(&hidden[row as usize * c..][..c])).collect();
    let wide_head: Vec<f64> = head.iter().map(|v| v.to_f64()).collect();
    let picked: Vec<f32> = rows.iter().flat_map(|&row| &hidden[row as usize * c..][..c]).copied().collect();
    for (chunk, smoothing) in [(1, 0.0), (5, 0.2), (64, 0.0)] {
        let (mut gathered, mut logits) = (vec![0f32; chunk * c], vec![0f32; chunk * v]);
        let (mut losses, mut d_hidden) = (vec![0f32; m], vec![f32::NAN; n * c]);
        let input = Supervised {
            hidden: hidden[..].into(),
            rows: Some(rows[..].into()),
            targets: targets[..].into(),
            smoothing,
        };
        let matrix = Matrix::f16(head[..].into(), v, c);
        let work =
            HeadScratch { gathered: gathered.as_mut_slice().into(), logits: logits.as_mut_slice().into() };
        let gradient = Some((d_hidden.as_mut_slice().into(), 0.37));
        forward_backward(input, matrix, work, losses.as_mut_slice().into(), gradient);
        let (expected, d_expected) =
            reference::forward_backward(&supervised, &targets, &wide_head, c, f64::from(smoothing));
        assert_close(&losses, &expected, 2e-6, "loss");
        let mut whole = vec![0f64; n * c];
        for (row, d) in rows.iter().zip(d_expected.chunks_exact(c)) {
            for (i, d) in d.iter().enumerate() {
                whole[*row as usize * c + i] = d * f64::from(0.37f32);
            }
        }
        assert_close(&d_hidden, &whole, 2e-6, "d_hidden");

        // The same rows alone give the same bits.
        let (mut losses_alone, mut d_alone) = (vec![0f32; m], vec![f32::NAN; m * c]);
        let input = Supervised { hidden: picked[..].into(), rows: None, ..input };
        let work =
            HeadScratch { gathered: (&mut [] as &mut [f32]).into(), logits: logits.as_mut_slice().into() };
        let gradient = Some((d_alone.as_mut_slice().into(), 0.37));
        forward_backward(input, matrix, work, losses_alone.as_mut_slice().into(), gradient);
        assert_eq!(losses_alone, losses);
        for (row, d) in rows.iter().zip(d_alone.chunks_exact(c)) {
            assert_eq!(d, &d_hidden[*row as usize * c..][..c]);
        }
    }
}
