//! A damaged catalog, after a graceful end or a crash: refused, or the same rows as before. After a
//! crash, the store may return the rows of the last commit or of the previous one.

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
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs code that catches panics of the store. The panic hook runs before a panic is caught, and
/// libFuzzer's hook ends the process: on this thread the hook is disabled until this returns.
fn with_caught_panics<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CATCHING.get() {
                report(info);
            }
        }));
    });
    CATCHING.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    CATCHING.set(false);
    result.unwrap_or_else(|_| panic!("the reader of the catalog panicked"))
}
