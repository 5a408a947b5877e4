//! Fuzz targets: functions that accept any bytes and panic if the product breaks a promise about
//! damaged or hostile input. They do not depend on a fuzzer. tests/no_root/fuzz.rs replays the
//! seeds of fuzz/seeds and a bounded number of their mutations; fuzz/fuzz_targets has a libFuzzer
//! binary for each target.
//!
//! A target neither ends the process nor depends on an earlier input.

mod calls;
mod catalog;
mod entries;
mod extents;
mod fixture;
mod paging;
mod record;
mod record_damage;
mod requests;
mod rows;
mod text;

use arbitrary::{Arbitrary, Unstructured};

/// Passes the names of all targets to the macro `$use`.
#[macro_export]
macro_rules! each_target {
    ($use:ident) => {
        $use! { calls catalog entries extents paging record record_damage requests rows text }
    };
}

macro_rules! export {
    ($($name:ident)*) => {
        $(pub use $name::$name;)*

        /// Each target with its name, which is also its directory in fuzz/seeds.
        pub const TARGETS: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name)),*];
    };
}

each_target!(export);

/// Runs a target with structured input, decoded like libFuzzer's `fuzz_target!`, which produced the
/// seeds. Bytes that do not decode are ignored.
fn decoded<'a, I: Arbitrary<'a>>(bytes: &'a [u8], run: impl FnOnce(I)) {
    if bytes.len() >= I::size_hint(0).0
        && let Ok(input) = I::arbitrary_take_rest(Unstructured::new(bytes))
    {
        run(input);
    }
}
