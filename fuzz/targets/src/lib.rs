//! Fuzz targets: functions that take any bytes and panic where the product breaks a promise about
//! input that is damaged or hostile. They do not depend on a fuzzer. tests/no_root/fuzz.rs replays the
//! seeds of fuzz/seeds and a bounded number of mutations of them; fuzz/fuzz_targets has a binary for
//! each target, in which libFuzzer explores.
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

        /// Each target with its name, which is also the name of its directory in fuzz/seeds.
        pub const TARGETS: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name)),*];
    };
}

each_target!(export);

/// Runs a target whose input has a structure, decoded from bytes as libFuzzer's `fuzz_target!` does: the
/// seeds were found with it. Bytes that do not decode are no input.
fn decoded<'a, I: Arbitrary<'a>>(bytes: &'a [u8], run: impl FnOnce(I)) {
    if bytes.len() >= I::size_hint(0).0
        && let Ok(input) = I::arbitrary_take_rest(Unstructured::new(bytes))
    {
        run(input);
    }
}
