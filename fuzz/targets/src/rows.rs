//! Any bytes as a row of the catalog or the header of a record: refused, or a value that
//! round-trips.

use std::fmt::Debug;

use csi_loopback::backend::tracker::Header;
use csi_loopback::backend::{Attachment, Group, Snapshot, Volume};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub fn rows(json: &[u8]) {
    check_round_trip::<Volume>(json);
    check_round_trip::<Snapshot>(json);
    check_round_trip::<Group>(json);
    check_round_trip::<Attachment>(json);
    check_round_trip::<Header>(json);
}

fn check_round_trip<R: Serialize + DeserializeOwned + PartialEq + Debug>(json: &[u8]) {
    let Ok(row) = serde_json::from_slice::<R>(json) else { return };
    let written = serde_json::to_vec(&row).unwrap();
    assert_eq!(serde_json::from_slice::<R>(&written).unwrap(), row);
}
