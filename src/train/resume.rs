//! Decides whether a run may go on from a save: only if the result is the same as without the interruption.

use std::path::Path;

use super::save::{Save, SaveInfo};
use crate::{
    device::DType,
    error::{Error, Result},
    optim::schedule::Schedule,
};

/// Refuses to go on from `past` when `now` differs in anything results depend on.
///
/// # Errors
/// One error that names every difference.
pub(super) fn check(past: &Save, now: &SaveInfo, values: usize, folder: &Path) -> Result<()> {
    let mut differences = option_differences(&past.info, now);
    let mut compare = |what: &str, now: &str, past: &str| {
        if now != past {
            differences.push(format!("{what} is {} (the run has {})", short(now), short(past)));
        }
    };
    let save = &past.info;
    compare("the fingerprint of --base", &now.base, &save.base);
    compare("the fingerprint of --data", &now.data, &save.data);
    compare("--device", &now.machine.device, &save.machine.device);
    compare("--precision", &now.machine.precision, &save.machine.precision);
    compare("the CPU's instruction level", &now.machine.dispatch, &save.machine.dispatch);
    if now.tensors != save.tensors || values != past.values() {
        compare("the number of trainable values", &values.to_string(), &past.values().to_string());
        if now.tensors != save.tensors {
            differences.push("the adapter's tensors have other names or shapes".to_owned());
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::input(format!(
        "--resume {}: the run cannot go on exactly, because {}; give what the run has, or start a new run without --resume",
        folder.display(),
        differences.join(", ")
    )))
}

/// Values that saves without these options stand for: earlier versions did not have them.
const ONCE: [(&str, &str); 1] = [("base-dtype", "\"f16\"")];

fn option_differences(past: &SaveInfo, now: &SaveInfo) -> Vec<String> {
    let mut names: Vec<&String> = past.options.keys().chain(now.options.keys()).collect();
    names.sort();
    names.dedup();
    let value = |info: &SaveInfo, name: &String| {
        let once = || ONCE.iter().find(|(option, _)| option == name).map(|(_, value)| (*value).to_owned());
        info.options.get(name).cloned().or_else(once)
    };
    let shown = |info: &SaveInfo, name: &String| value(info, name).unwrap_or_else(|| "not given".to_owned());
    names
        .into_iter()
        .filter(|name| value(past, name) != value(now, name))
        .map(|name| format!("--{name} is {} (the run has {})", shown(now, name), shown(past, name)))
        .collect()
}

/// The first digits of a fingerprint, enough to tell two apart; short text unchanged.
fn short(text: &str) -> &str {
    let digits = text.rsplit(':').next().unwrap_or(text);
    digits.get(..12).unwrap_or(digits)
}

/// The effect of a changed number of steps on the schedule; `None` when it did not change.
///
/// # Errors
/// When fewer steps are asked for than are done.
pub(super) fn changed_length(
    past: &SaveInfo,
    now: &SaveInfo,
    schedule: Schedule,
    warmup: impl Fn(u64) -> u64,
) -> Result<Option<String>> {
    let (done, before, after) = (past.step, past.steps, now.steps);
    if after < done {
        return Err(Error::input(format!(
            "--steps {after}: the run has done {done} already; give at least {done}"
        )));
    }
    if after == before {
        return Ok(None);
    }
    if past.spec.depends_on_steps() {
        return Err(Error::input(format!(
            "--steps {after}: the ranks of an AdaLoRA are allocated over the {before} steps that the run has; \
             give {before}, or train the finished adapter further with --init-adapter"
        )));
    }
    let rate = |steps| schedule.rate(warmup(steps), steps, done);
    let rates = format!(
        "the learning rate of step {} is {:.3e} instead of {:.3e}",
        done + 1,
        rate(after),
        rate(before)
    );
    let effect = if schedule.depends_on_length() {
        format!("the schedule now ends at step {after}, {rates}")
    } else {
        "the schedule stays as it was".to_owned()
    };
    Ok(Some(format!("--steps changes from {before} to {after}: {effect}")))
}

/// Refuses a save with a value that is not finite: no step can come of it.
///
/// # Errors
/// [`Error::Input`] when there is such a value.
pub(super) fn check_finite(past: &Save) -> Result<()> {
    let finite =
        |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().all(|four| f32::from_le_bytes(*four).is_finite());
    let mut floats = past.tensors().into_iter().filter(|tensor| tensor.dtype == DType::F32);
    let found =
        floats.try_for_each(|tensor| tensor.each_piece(|_, piece| finite(piece).then_some(()).ok_or(())));
    found.map_err(|()| Error::input(format!(
        "--resume: the save of step {} holds values that are not finite; start a new run with a lower --lr",
        past.info.step
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::VALUES,
        observe::machine::Machine,
        optim::schedule::Decay,
        train::save::{self, FORMAT},
    };

    fn info() -> SaveInfo {
        SaveInfo {
            format: FORMAT,
            step: 5,
            steps: 10,
            options: [("lr".to_owned(), "0.1".to_owned()), ("seed".to_owned(), "0".to_owned())].into(),
            base: format!("kind:{}", "b".repeat(64)),
            data: "d".repeat(64),
            machine: Machine { device: "cpu".into(), precision: "f32".into(), dispatch: "avx2".into() },
            spec: Default::default(),
            tensors: vec!["a [2]".to_owned()],
            optimizer: "adamw".to_owned(),
            loss_scale: None,
            progress: Default::default(),
        }
    }

    fn save_of(values: [f32; 2]) -> Save {
        let folder = tempfile::tempdir().unwrap();
        let path = save::write(folder.path(), &info(), &[(VALUES, values[..].into(), None)]).unwrap();
        save::read(&path).unwrap()
    }

    fn save() -> Save {
        save_of([0.0; 2])
    }

    #[test]
    fn every_difference_is_named_at_once() {
        assert!(check(&save(), &info(), 2, Path::new("r")).is_ok());
        let mut now = info();
        now.options.insert("lr".into(), "0.2".into());
        now.options.insert("rslora".into(), "true".into());
        now.base = format!("kind:{}", "x".repeat(64));
        now.machine.dispatch = "avx512".into();
        let message = check(&save(), &now, 2, Path::new("r")).unwrap_err().to_string();
        for part in [
            "--lr is 0.2 (the run has 0.1)",
            "--rslora is true (the run has not given)",
            "--base is xxxxxxxxxxxx (the run has bbbbbbbbbbbb)",
            "level is avx512 (the run has avx2)",
        ] {
            assert!(message.contains(part), "{message}");
        }
        assert!(!message.contains("seed") && !message.contains("--data"), "{message}");
    }

    #[test]
    fn a_save_from_before_an_option_has_its_old_value() {
        let with = |value: &str| {
            let mut now = info();
            now.options.insert("base-dtype".into(), value.into());
            check(&save(), &now, 2, Path::new("r"))
        };
        assert!(with("\"f16\"").is_ok());
        let message = with("\"q8\"").unwrap_err().to_string();
        assert!(message.contains("--base-dtype is \"q8\" (the run has \"f16\")"), "{message}");
    }

    #[test]
    fn a_longer_run_says_what_happens_to_the_schedule() {
        let longer = SaveInfo { steps: 20, ..info() };
        let change = |now: &SaveInfo, decay| {
            changed_length(&info(), now, Schedule { lr: 1.0, min_lr: 0.0, decay }, |_| 0)
        };
        assert_eq!(change(&info(), Decay::Linear).unwrap(), None);
        let said = change(&longer, Decay::Linear).unwrap().unwrap();
        assert!(said.contains("from 10 to 20") && said.contains("7.500e-1 instead of 5.000e-1"), "{said}");
        assert!(change(&longer, Decay::Constant).unwrap().unwrap().contains("stays"));
        let fewer = SaveInfo { steps: 4, ..info() };
        assert_eq!(change(&fewer, Decay::Linear).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn a_save_that_is_not_finite_is_refused() {
        assert!(check_finite(&save()).is_ok());
        for value in [f32::NAN, f32::INFINITY] {
            assert_eq!(check_finite(&save_of([0.0, value])).unwrap_err().exit_code(), 2);
        }
    }
}
