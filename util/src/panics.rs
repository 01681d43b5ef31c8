//! Panics of other crates that are caught: nobody is told of them.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// The result of `run`, or `None` if it panicked. What `run` was changing then may be half done.
pub fn catch<T>(run: impl FnOnce() -> T) -> Option<T> {
    let before = EXPECTED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run)).ok();
    EXPECTED.set(before);
    result
}

/// Whether a panic of this thread would be caught by [`catch`]: a panic hook says nothing of it.
pub fn is_expected() -> bool {
    EXPECTED.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_none() {
        assert_eq!(catch(|| (is_expected(), 1)), Some((true, 1)));
        let outer = catch(|| {
            let inner: Option<()> = catch(|| panic!("as a test"));
            (inner, is_expected())
        });
        assert_eq!((outer, is_expected()), (Some((None, true)), false));
    }
}
