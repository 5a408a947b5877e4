//! An answer as kubectl prints it: a Table (meta.k8s.io/v1) of one row.

use serde_json::{Value, json};

use crate::kubernetes::snapshot_delta::VolumeSnapshotDelta;

/// Columns: name, type, whether only `-o wide` shows it, and what it says.
const COLUMNS: [(&str, &str, bool, &str); 5] = [
    ("Name", "string", false, "Name of the VolumeSnapshotDelta, if it has one."),
    ("State", "string", false, "Completed, Continue or Failed."),
    ("Blocks", "integer", false, "Blocks in this answer."),
    ("Continue", "integer", false, "The offset of the next request, if the state is Continue."),
    ("Error", "string", true, "What went wrong in the driver, if the state is Failed."),
];

/// The table of one answer, which holds the object too.
pub fn of(delta: &VolumeSnapshotDelta) -> Value {
    let columns = COLUMNS.map(|(name, kind, wide, says)| {
        let format = if name == "Name" { "name" } else { "" };
        json!({
            "name": name, "type": kind, "format": format, "description": says,
            "priority": i32::from(wide),
        })
    });
    let status = delta.status.clone().unwrap_or_default();
    let cells = json!([
        delta.metadata.name.as_deref().unwrap_or_default(),
        status.state,
        status.changed_blocks.len(),
        status.next,
        status.error,
    ]);
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {},
        "columnDefinitions": columns,
        "rows": [{ "cells": cells, "object": delta }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::snapshot_delta::{
        ChangedBlock, VolumeSnapshotDeltaState, VolumeSnapshotDeltaStatus,
    };

    #[test]
    fn a_table_has_a_cell_for_each_column() {
        let status = VolumeSnapshotDeltaStatus {
            changed_blocks: vec![ChangedBlock::default(); 2],
            state: VolumeSnapshotDeltaState::Continue,
            next: 7,
            ..VolumeSnapshotDeltaStatus::default()
        };
        let mut delta =
            VolumeSnapshotDelta { status: Some(status), ..VolumeSnapshotDelta::default() };
        delta.metadata.name = Some("a".into());
        let table = of(&delta);
        assert_eq!(table["rows"][0]["cells"], json!(["a", "Continue", 2, 7, ""]));
        assert_eq!(table["columnDefinitions"].as_array().unwrap().len(), 5);
        assert_eq!(table["columnDefinitions"][4]["priority"], 1);
    }
}
