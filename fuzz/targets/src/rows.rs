//! Any bytes as a row of the catalog, or as the header of a record: refused, or a value that reads as
//! itself once it was written.

use std::fmt::Debug;

use csi_loopback::backend::tracker::Header;
use csi_loopback::backend::{Attachment, Group, Snapshot, Volume};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub fn rows(json: &[u8]) {
    stays::<Volume>(json);
    stays::<Snapshot>(json);
    stays::<Group>(json);
    stays::<Attachment>(json);
    stays::<Header>(json);
}

fn stays<R: Serialize + DeserializeOwned + PartialEq + Debug>(json: &[u8]) {
    let Ok(row) = serde_json::from_slice::<R>(json) else { return };
    let written = serde_json::to_vec(&row).unwrap();
    assert_eq!(serde_json::from_slice::<R>(&written).unwrap(), row);
}
