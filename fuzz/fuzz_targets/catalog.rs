//! A catalog that was damaged, after an orderly end or a crash: refused, or the same rows as before.
//! What the store may give back after a crash are the rows of its last commit, or of the one before.
#![no_main]

use std::sync::OnceLock;

use csi_loopback::backend::{Error, Volume};
use csi_loopback::fuzzing::read_verified;
use csi_loopback_fuzz::{Damage, catalog_bytes, file_of, path_of, volume};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

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

fuzz_target!(
    // The reader catches what the store below it panics at; what it does not catch ends this process
    // all the same.
    init: std::panic::set_hook(Box::new(|_| {})),
    |input: Input| {
        let Base { before, rows, closed, crashed } = base();
        let mut bytes = if input.crashed { crashed.clone() } else { closed.clone() };
        input.damage.apply(&mut bytes);
        let file = file_of(&bytes);
        let read = read_verified(&path_of(&file), |rows| rows.select(|_: &Volume| true));
        let wrong = match read {
            Ok(read) if read == *rows || (input.crashed && read == *before) => return,
            Err(Error::Damaged(_)) => return,
            Ok(read) => format!("other rows: {read:?}"),
            Err(other) => format!("{other:?}"),
        };
        eprintln!("{wrong}");
        std::process::abort();
    }
);
