//! Saves are read back bit for bit, or refused.

use super::*;

fn info(step: u64) -> SaveInfo {
    SaveInfo {
        format: FORMAT,
        step,
        steps: 10,
        options: [("lr".to_owned(), "0.1".to_owned())].into(),
        base: "b".to_owned(),
        data: "d".to_owned(),
        machine: Machine { device: "cpu".into(), precision: "f32".into(), dispatch: "avx2".into() },
        spec: AdapterSpec::default(),
        tensors: vec!["a".to_owned()],
    }
}

fn state(step: u64) -> TrainerState {
    let values = vec![1.0, -0.0, f32::MIN_POSITIVE / 3.0];
    TrainerState { step, values, first_moment: vec![0.1; 3], second_moment: vec![1e-30; 3] }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_save_reads_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &info(3), &state(3)).unwrap();
    assert!(path.ends_with("step-00000003.safetensors"));
    let save = read(&path).unwrap();
    assert_eq!(save.info, info(3));
    assert_eq!(bits(&save.state.values), bits(&state(3).values));
    assert_eq!(bits(&save.state.first_moment), bits(&[0.1; 3]));
    assert_eq!(bits(&save.state.second_moment), bits(&[1e-30; 3]));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn any_changed_or_missing_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(write(folder.path(), &info(3), &state(3)).unwrap()).unwrap();
    assert!(parse(&bytes).is_ok());
    for index in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[index] ^= 1;
        assert!(parse(&changed).is_err(), "byte {index} of {}", bytes.len());
    }
    assert!((0..bytes.len()).all(|length| parse(&bytes[..length]).is_err()));
}

#[test]
fn a_damaged_newest_save_falls_back() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &info(5), &state(5)).unwrap();
    let newer = write(folder.path(), &info(100_000_000), &state(100_000_000)).unwrap();
    fs::write(&newer, &fs::read(&newer).unwrap()[..200]).unwrap();
    let (save, skipped) = newest(folder.path()).unwrap().unwrap();
    assert_eq!((save.info.step, skipped.len()), (5, 1));
    assert!(skipped[0].contains("step-100000000"), "{}", skipped[0]);
    fs::remove_file(folder.path().join("step-00000005.safetensors")).unwrap();
    assert_eq!(newest(folder.path()).unwrap_err().exit_code(), 2);
}

#[test]
fn a_folder_without_saves_has_none() {
    let folder = tempfile::tempdir().unwrap();
    assert!(newest(folder.path()).unwrap().is_none());
    assert!(newest(&folder.path().join("missing")).unwrap().is_none());
}

#[test]
fn only_the_newest_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    for step in [2, 10, 9] {
        write(folder.path(), &info(step), &state(step)).unwrap();
    }
    let steps =
        || -> Vec<_> { list(folder.path()).unwrap().iter().filter_map(|path| step_of(path)).collect() };
    prune(folder.path(), 10, 2).unwrap();
    assert_eq!(steps(), [9, 10]);
    // A run that went back to step 9 and saves there leaves nothing behind it.
    prune(folder.path(), 9, 2).unwrap();
    assert_eq!(steps(), [9]);
}

#[test]
fn a_save_under_the_name_of_another_step_is_unusable() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &info(2), &state(2)).unwrap();
    fs::copy(&path, folder.path().join("step-00000099.safetensors")).unwrap();
    let (save, skipped) = newest(folder.path()).unwrap().unwrap();
    assert_eq!((save.info.step, skipped.len()), (2, 1));
    assert!(skipped[0].contains("of step 2"), "{}", skipped[0]);
}

#[test]
fn another_format_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &SaveInfo { format: 7, ..info(1) }, &state(1)).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("format is 7"));
}
