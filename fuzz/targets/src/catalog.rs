//! A catalog that was damaged, after an orderly end or a crash: refused, or the same rows as before.
//! What the store may give back after a crash are the rows of its last commit, or of the one before.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Once, OnceLock};

use crate::fixture::{Damage, catalog_bytes, file_of, path_of, volume};
use arbitrary::Arbitrary;
use csi_loopback::backend::{Error, Volume};
use csi_loopback::fuzzing::read_verified;

#[derive(Debug, Arbitrary)]
struct Input {
    crashed: bool,
    damage: Damage,
}

struct Base {
    before: Vec<Volume>,
    rows: Vec<Volume>,
    closed: Vec<u8>,
    crashed: Vec<u8>,
}

fn base() -> &'static Base {
    static BASE: OnceLock<Base> = OnceLock::new();
    BASE.get_or_init(|| {
        let before: Vec<Volume> = (0..40).map(|number| volume(number, 0)).collect();
        let rows: Vec<Volume> = (1..41).map(|number| volume(number, number % 2)).collect();
        let (closed, crashed) = catalog_bytes(&[&before, &rows]);
        Base { before, rows, closed, crashed }
    })
}

pub fn catalog(input: &[u8]) {
    crate::decoded(input, check);
}

fn check(input: Input) {
    let Base { before, rows, closed, crashed } = base();
    let mut bytes = if input.crashed { crashed.clone() } else { closed.clone() };
    input.damage.apply(&mut bytes);
    let file = file_of(&bytes);
    let read = with_caught_panics(|| {
        read_verified(&path_of(&file), |rows| rows.select(|_: &Volume| true))
    });
    match read {
        Ok(read) if read == *rows || (input.crashed && read == *before) => {}
        Err(Error::Damaged(_)) => {}
        Ok(read) => panic!("other rows: {read:?}"),
        Err(other) => panic!("{other:?}"),
    }
}

thread_local! {
    static CATCHES: Cell<bool> = const { Cell::new(false) };
}

/// Runs what catches the panics of the store below it. The panic hook hears of a panic before it is
/// caught, and libFuzzer's hook ends the process: on this thread it hears of none until this returns.
fn with_caught_panics<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CATCHES.get() {
                report(info);
            }
        }));
    });
    CATCHES.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    CATCHES.set(false);
    result.unwrap_or_else(|_| panic!("the reader of the catalog panicked"))
}
