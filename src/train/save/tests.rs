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
        optimizer: "adamw8bit".to_owned(),
        loss_scale: None,
        progress: Default::default(),
    }
}

const FLOATS: [f32; 3] = [1.0, -0.0, f32::MIN_POSITIVE / 3.0];
const CODES: [u8; 5] = [0, 255, 7, 8, 9];

/// Tensors as of a trainer: floats, an empty tensor, codes, and floats that then begin on no boundary.
fn tensors() -> [StateTensor<'static>; 4] {
    [
        (VALUES, FLOATS[..].into(), None),
        ("first_moment", FLOATS[..0].into(), None),
        ("first_codes", CODES[..].into(), None),
        ("first_scales", FLOATS[..2].into(), None),
    ]
}

fn save(folder: &Path, step: u64) -> PathBuf {
    write(folder, &info(step), &tensors()).unwrap()
}

#[test]
fn a_save_reads_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), 3);
    assert!(path.ends_with("step-00000003.safetensors"));
    let save = read(&path).unwrap();
    assert_eq!((&save.info, save.values()), (&info(3), 3));
    assert_eq!(save.tensors().len(), 4);
    for (stored, (name, view, _)) in save.tensors().iter().zip(tensors()) {
        assert_eq!((stored.name, stored.dtype, stored.bytes), (name, view.dtype(), view.bytes()));
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn any_changed_or_missing_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(save(folder.path(), 3)).unwrap();
    let parse = |bytes: &[u8]| parse(Arc::new(bytes.to_vec()));
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
    save(folder.path(), 5);
    let newer = save(folder.path(), 100_000_000);
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
        save(folder.path(), step);
    }
    let steps =
        || -> Vec<_> { list(folder.path()).unwrap().iter().filter_map(|path| step_of(path)).collect() };
    prune(folder.path(), 10, 2).unwrap();
    assert_eq!(steps(), [9, 10]);
    // A run that went back to step 9 and saves there leaves no later save.
    prune(folder.path(), 9, 2).unwrap();
    assert_eq!(steps(), [9]);
}

#[test]
fn a_save_under_the_name_of_another_step_is_unusable() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), 2);
    fs::copy(&path, folder.path().join("step-00000099.safetensors")).unwrap();
    let (save, skipped) = newest(folder.path()).unwrap().unwrap();
    assert_eq!((save.info.step, skipped.len()), (2, 1));
    assert!(skipped[0].contains("of step 2"), "{}", skipped[0]);
}

#[test]
fn another_format_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for format in [1, 7] {
        let path = write(folder.path(), &SaveInfo { format, ..info(1) }, &tensors()).unwrap();
        let message = read(&path).unwrap_err().to_string();
        assert!(message.contains(&format!("format is {format}, this program reads 2")), "{message}");
    }
    // The description of a save of the first format, which knew no optimizer.
    let mut first = serde_json::to_value(SaveInfo { format: 1, ..info(1) }).unwrap();
    first.as_object_mut().unwrap().remove("optimizer");
    assert!(describe(&first.to_string()).unwrap_err().contains("format is 1"));
}

#[test]
fn programs_that_do_not_train_know_the_name_of_the_values() {
    assert_eq!(crate::saved::VALUES, VALUES);
}
