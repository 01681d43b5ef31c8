//! The shim itself: kernels with a known mistake are noticed.

use cuda_shim::{Failure, kernels, launch};

use crate::{args, harness::*};

kernels!(
    reverse_right_launch,
    reverse_without_barrier_launch,
    divergent_barrier_launch,
    beyond_the_end_launch
);

fn reversed(kernel: cuda_shim::Launcher, seed: u64) -> bool {
    let numbers = Device::<i32>::of(&(0..128).map(f64::from).collect::<Vec<_>>());
    run(kernel, [1, 1, 1], 128, 0, seed, args![numbers.head()]);
    numbers.get().iter().enumerate().all(|(at, &x)| x == 127 - at as i32)
}

#[test]
fn a_missing_barrier_gives_a_wrong_result() {
    assert!(SEEDS.into_iter().all(|seed| reversed(reverse_right_launch, seed)));
    assert!(SEEDS.into_iter().all(|seed| !reversed(reverse_without_barrier_launch, seed)));
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_a_deadlock() {
    let numbers = Device::<i32>::of(&[0.0; 128]);
    // SAFETY: the kernel's one parameter is a pointer to 128 numbers.
    let result = unsafe { launch(divergent_barrier_launch, [1, 1, 1], 128, 0, 1, args![numbers.head()]) };
    assert_eq!(result, Err(Failure::Deadlock));
}

#[test]
#[should_panic(expected = "wrote beyond")]
fn a_wrong_index_meets_the_guard() {
    let numbers = Device::<i32>::of(&[0.0; 128]);
    run(beyond_the_end_launch, [1, 1, 1], 128, 0, 1, args![numbers.head()]);
    numbers.get();
}

#[test]
fn too_many_threads_are_refused() {
    let numbers = Device::<i32>::of(&[0.0; 128]);
    // SAFETY: the launch is refused before the kernel runs.
    let result = unsafe { launch(reverse_right_launch, [1, 1, 1], 1056, 0, 1, args![numbers.head()]) };
    assert_eq!(result, Err(Failure::Misuse));
}
