//! Tests of a recording: thinning, peaks, files, and the thread that records.

use std::fs;

use super::*;

const MIB: u64 = 1 << 20;

fn sample(index: usize, resident: u64, phase: Phase) -> Sample {
    let file = resident / 4;
    Sample {
        seconds: index as f64 * 0.02,
        resident,
        anonymous: resident - file,
        file,
        counted: resident / 2,
        phase,
    }
}

/// A run of `steps` steps after loading: 30 samples a step, rising in the forward, falling in the backward.
fn synthetic(steps: usize) -> TraceRecorder {
    let mut timeline = Timeline::new(KEPT);
    let mut index = 0;
    let mut push = |mib: u64, phase: Phase| {
        let resident = mib * MIB;
        let file = resident.min(330 * MIB);
        let base = sample(index, resident, phase);
        let anonymous = resident - file;
        timeline.push(Sample { file, anonymous, counted: anonymous.saturating_sub(9 * MIB), ..base });
        index += 1;
    };
    (0..50).for_each(|i| push(20 + i * 7, Phase::Loading));
    for step in 0..steps as u64 {
        (0..10).for_each(|i| push(420 + i * 35, Phase::Forward));
        (0..4).for_each(|i| push(770 + i * 40 + step % 7, Phase::Head));
        (0..13).for_each(|i| push(800 - i * 30, Phase::Backward));
        (0..3).for_each(|_| push(430, Phase::Update));
    }
    (0..30).for_each(|i| push(430 + i % 9 * 20, Phase::Evaluation));
    (0..10).for_each(|_| push(440, Phase::Saving));
    timeline.finish(Some(901 * MIB))
}

#[test]
fn thinning_keeps_the_peaks_the_order_and_the_bound() {
    let mut timeline = Timeline::new(64);
    let spike = 777;
    for index in 0..10_000 {
        let phase = if index % 2 == 0 { Phase::Forward } else { Phase::Backward };
        let height = if index == spike { 5000 } else { 100 + index as u64 % 50 };
        timeline.push(sample(index, height * MIB, phase));
    }
    let recording = timeline.finish(None);
    assert!((32..=65).contains(&recording.samples.len()), "{}", recording.samples.len());
    assert!(recording.samples.is_sorted_by(|a, b| a.seconds < b.seconds));
    let peak = recording.peak.unwrap();
    assert_eq!((peak.resident, peak.phase, peak.seconds), (5000 * MIB, Phase::Backward, spike as f64 * 0.02));
    assert!(recording.samples.contains(&peak));
    let phases: Vec<_> = recording.phases.iter().map(|peak| (peak.phase, peak.resident / MIB)).collect();
    assert_eq!(phases, [(Phase::Forward, 148), (Phase::Backward, 5000)]);
}

#[test]
fn both_files_hold_plan_and_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let recording = synthetic(20);
    recording.write(&path, &[(Phase::Forward, 800 * MIB), (Phase::Head, 900 * MIB)], 900 * MIB).unwrap();

    let file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(file["planned"]["total_bytes"], 900 * MIB);
    assert_eq!(file["planned"]["moments"][1], json!({ "moment": "head", "bytes": 900 * MIB }));
    assert_eq!(file["measured"]["peak"]["moment"], "head");
    assert_eq!(file["measured"]["peak"]["resident_bytes"], 896 * MIB);
    assert_eq!(file["measured"]["high_water_bytes"], 901 * MIB);
    assert_eq!(file["measured"]["moments"].as_array().unwrap().len(), 7);
    for quantity in ["seconds", "resident_bytes", "anonymous_bytes", "file_bytes", "counted_bytes", "moment"]
    {
        assert_eq!(file["samples"][quantity].as_array().unwrap().len(), 690, "{quantity}");
    }

    let svg = fs::read_to_string(path.with_extension("svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in
        ["time (s)", "memory (MiB)", "planned peak 900 MiB", "highest 896 MiB in head", "backward: 800 MiB"]
    {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn a_recording_of_nothing_and_one_of_gibibytes_can_be_drawn() {
    let empty = Timeline::new(8).finish(None);
    assert!(plot::svg(&empty, 0).unwrap().contains("MiB"));
    let mut timeline = Timeline::new(8);
    timeline.push(Sample { counted: 3 << 30, ..sample(0, 0, Phase::Loading) });
    let svg = plot::svg(&timeline.finish(None), 5 << 30).unwrap();
    let long = plot::svg(&synthetic(100), 900 * MIB).unwrap();
    assert!(long.contains("each point the highest in 0.3 s"), "3090 samples of 20 ms, 13 a point");
    assert!(long.len() < 200_000, "{} bytes", long.len());
    assert!(svg.contains("memory (GiB)") && svg.contains("planned peak 5.00 GiB") && svg.contains("Counted"));
}

#[test]
fn the_picture_does_not_take_the_place_of_the_data() {
    let error = synthetic(1).write(Path::new("trace.svg"), &[], 0).unwrap_err();
    assert!(error.to_string().contains(".json"), "{error}");
}

#[test]
fn a_thread_records_until_it_is_stopped() {
    let trace = Trace::start_with(Duration::from_millis(1), 100).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    let recording = trace.finish().unwrap();
    let count = recording.samples.len();
    assert!((3..=100).contains(&count), "{count} samples");
    assert!(recording.samples.is_sorted_by(|a, b| a.seconds <= b.seconds));
    assert!(recording.samples[count - 1].seconds >= 0.05);
    if cfg!(target_os = "linux") {
        let peak = recording.peak.unwrap();
        assert!(peak.resident > MIB && peak.anonymous > 0 && peak.file > 0, "{peak:?}");
        assert!(recording.high_water.unwrap() > MIB);
    }
    drop(Trace::start().unwrap()); // returns: the thread ends with it
}
