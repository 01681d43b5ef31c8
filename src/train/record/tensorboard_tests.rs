//! Our bytes beside those of TensorBoard's own writer (`benchmarks/read_tensorboard.py record`).

use super::*;

const RECORDED: &[u8] = include_bytes!("../../../tests/golden/tensorboard/events");
const TIME: f64 = 1_763_881_920.25;

#[test]
fn the_bytes_are_those_of_tensorboards_writer() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = EventFile::create(folder.path(), TIME, Some(3)).unwrap();
    let scalars = [("train/loss", 2.5), ("train/learning_rate", 0.001), ("train/grad_norm", 0.0)];
    file.scalars(TIME, 3, &scalars).unwrap();
    file.text(TIME, 300, "sample", "    Once upon a time\n    ünïcode").unwrap();
    let written = fs::read(file.path()).unwrap();
    assert_eq!(written, RECORDED);
}

#[test]
fn files_are_read_in_the_order_they_were_made() {
    let folder = tempfile::tempdir().unwrap();
    let name = |time| {
        let file = EventFile::create(folder.path(), time, None).unwrap();
        file.path().file_name().unwrap().to_string_lossy().into_owned()
    };
    // Two in one second, and one after the clock was set back.
    let names = [1000.2, 1000.9, 999.0, 1001.0].map(name);
    assert_eq!(names[0], "events.out.tfevents.0000001000.engraft.0000");
    assert_eq!(names[1], "events.out.tfevents.0000001000.engraft.0001");
    assert!(names.is_sorted_by(|a, b| a < b) && names.iter().all(|name| is_event_file(name)), "{names:?}");
}

#[test]
fn numbers_take_as_many_bytes_as_they_need() {
    let bytes = |value| {
        let mut message = Message::default();
        message.varint(2, value);
        message.0
    };
    assert!(bytes(0).is_empty());
    assert_eq!(bytes(127), [0x10, 0x7f]);
    assert_eq!(bytes(300), [0x10, 0xac, 0x02]);
    assert_eq!(bytes(u64::MAX).len(), 11);
}
