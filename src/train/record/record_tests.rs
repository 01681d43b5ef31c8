//! What is kept of a record when a run goes on.

use std::fs;

use super::{metrics::Kept, *};

fn step(step: u64, loss: f64) -> String {
    let line = StepLine {
        step,
        loss,
        smoothed_loss: 0.0,
        lr: 1e-3,
        grad_norm: Some(f64::INFINITY),
        tokens: 3,
        tokens_per_s: 7.5,
        seconds: 0.25,
        epoch: 0.5,
        elapsed: step as f64,
        remaining: 1.0,
        memory_bytes: None,
        loss_scale: None,
        overflows: None,
    };
    Stamped::now(Line::Step(line)).text()
}

#[test]
fn lines_of_later_steps_and_half_a_line_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = metrics::path(folder.path());
    let (one, two, three) = (step(1, 4.0), step(2, 3.0), step(3, 2.0));
    let unknown = "{\"event\":\"of a later version\",\"step\":9}\nno JSON\n";
    fs::write(&path, format!("{one}{unknown}{two}{three}{{\"event\":\"st")).unwrap();
    let kept = |step| metrics::kept(&path, step).unwrap();
    let mut smoothed = super::super::pace::Smoothed::default();
    assert_eq!(kept(0), Kept::default());
    smoothed.add(4.0);
    smoothed.add(3.0);
    let bytes = (one.len() + unknown.len() + two.len()) as u64;
    assert_eq!(kept(2), Kept { bytes, history: History { smoothed, elapsed: 2.0 } });
    let all = bytes + three.len() as u64;
    assert_eq!((kept(3).bytes, kept(99).bytes), (all, all));
    assert_eq!(metrics::kept(&folder.path().join("none"), 5).unwrap(), Kept::default());
}

#[test]
fn a_line_reads_back() {
    let text = step(7, 2.5);
    assert!(text.ends_with("}\n") && text.matches('\n').count() == 1, "{text}");
    let Stamped { time, line } = serde_json::from_str(&text).unwrap();
    assert!((time - now()).abs() < 60.0);
    let Line::Step(line) = line else { panic!("{text}") };
    // JSON knows no infinity.
    assert_eq!((line.step, line.loss, line.grad_norm), (7, 2.5, None));
}
