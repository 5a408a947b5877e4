//! VolumeSnapshotDelta (KEP-3314, VolumeSnapshotDelta, "API Specification"): asks for the blocks that differ between two
//! VolumeSnapshots of its namespace, and is answered in its status. It can only be created and is never stored.
//!
//! The proposal's example and its Go types disagree; docs/reference/aggregated-api.md says what was chosen: the types' `changedBlocks`,
//! block numbers and not bytes, states as strings.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::de::{Error as _, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

pub const GROUP: &str = "cbt.storage.k8s.io";
pub const VERSION: &str = "v1alpha1";
pub const API_VERSION: &str = "cbt.storage.k8s.io/v1alpha1";
pub const KIND: &str = "VolumeSnapshotDelta";
pub const PLURAL: &str = "volumesnapshotdeltas";

/// Entries of a page where `spec.limit` says nothing.
pub const DEFAULT_LIMIT: u64 = 256;

/// A question, and in its status the answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotDelta {
    pub api_version: String,
    pub kind: String,
    #[serde(default)]
    pub metadata: ObjectMeta,
    pub spec: VolumeSnapshotDeltaSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<VolumeSnapshotDeltaStatus>,
}

/// What is asked.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotDeltaSpec {
    /// Name of the VolumeSnapshot to compare with. Without it, all blocks that the target holds are listed.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub base_volume_snapshot_name: String,
    /// Name of the VolumeSnapshot whose blocks are listed.
    pub target_volume_snapshot_name: String,
    /// Secret of this namespace that the CSI driver needs for the call. All of its entries are passed.
    #[serde(
        default,
        alias = "volumeSnapshotDeltaSecretRef",
        alias = "VolumeSnapshotDeltaSecretRef",
        skip_serializing_if = "Option::is_none"
    )]
    pub secret_ref: Option<SecretReference>,
    /// The kind of metadata; there is only "block".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Entries of the answer, at most; 0 means 256. The server has a maximum of its own.
    #[serde(default, deserialize_with = "or_default")]
    pub limit: u64,
    /// Number of the block to begin with: 0, or what status.continue of the page before said.
    #[serde(default, deserialize_with = "or_default")]
    pub offset: u64,
}

/// A Secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SecretReference {
    /// Name of the Secret.
    pub name: String,
    /// That of the VolumeSnapshotDelta, which is also the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotDeltaStatus {
    /// The blocks, in ascending order. Those of one answer have one size.
    #[serde(
        default,
        alias = "changedBlockDeltas",
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub changed_blocks: Vec<ChangedBlock>,
    /// What went wrong in the driver, if the state is Failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Completed: nothing follows. Continue: more follows, from the block that `continue` names. Failed: see `error`.
    #[serde(default)]
    pub state: VolumeSnapshotDeltaState,
    /// Entries that this answer could have.
    #[serde(default)]
    pub limit: u64,
    /// The block that it began with.
    #[serde(default)]
    pub offset: u64,
    /// The offset of the next request, if the state is Continue; else 0.
    #[serde(default, rename = "continue")]
    pub next: u64,
    /// Size of the volume in bytes, where the driver says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_size_bytes: Option<u64>,
}

/// A block that differs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChangedBlock {
    /// Number of the block: it begins at offset times blockSizeBytes.
    pub offset: u64,
    /// Size of the block in bytes.
    pub block_size_bytes: u64,
    /// With what the driver hands out the block's content, where it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_token: Option<DataToken>,
}

/// A driver's token for the content of a block.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DataToken {
    /// As the driver says it.
    pub token: String,
    /// RFC 3339.
    pub issuance_time: String,
    /// A duration such as 3h0m0s.
    pub ttl: String,
}

/// `status.state`. A number on input is its place in the proposal's list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, JsonSchema)]
pub enum VolumeSnapshotDeltaState {
    #[default]
    Completed,
    Continue,
    Failed,
}

impl<'de> Deserialize<'de> for VolumeSnapshotDeltaState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(u64),
            Text(String),
        }
        const EXPECTED: &str = "Completed, Continue, Failed or their numbers 0, 1, 2";
        match Either::deserialize(deserializer)? {
            Either::Number(0) => Ok(Self::Completed),
            Either::Number(1) => Ok(Self::Continue),
            Either::Number(2) => Ok(Self::Failed),
            Either::Number(other) => {
                Err(D::Error::invalid_value(Unexpected::Unsigned(other), &EXPECTED))
            }
            Either::Text(text) => match text.as_str() {
                "Completed" => Ok(Self::Completed),
                "Continue" => Ok(Self::Continue),
                "Failed" => Ok(Self::Failed),
                other => Err(D::Error::invalid_value(Unexpected::Str(other), &EXPECTED)),
            },
        }
    }
}

/// Go writes what is empty as null.
pub fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn states_are_strings_on_output_and_strings_or_numbers_on_input() {
        use VolumeSnapshotDeltaState::{Completed, Continue, Failed};
        for (number, text, state) in
            [(0, "Completed", Completed), (1, "Continue", Continue), (2, "Failed", Failed)]
        {
            assert_eq!(serde_json::to_value(state).unwrap(), json!(text));
            for input in [json!(number), json!(text)] {
                assert_eq!(
                    serde_json::from_value::<VolumeSnapshotDeltaState>(input).unwrap(),
                    state
                );
            }
        }
        for bad in [json!(3), json!("completed"), json!(null), json!(-1)] {
            assert!(serde_json::from_value::<VolumeSnapshotDeltaState>(bad).is_err());
        }
    }

    #[test]
    fn the_example_and_the_types_of_the_proposal_are_both_read() {
        let status = |blocks: &str| {
            json!({ "limit": 256, "offset": 0, "continue": 3, "state": 1, blocks: [{
                "offset": 0, "blockSizeBytes": 524_288,
                "dataToken": { "token": "t", "issuanceTime": "2022-07-13T03:19:30Z", "ttl": "3h0m0s" },
            }]})
        };
        let [types, example] = ["changedBlocks", "changedBlockDeltas"]
            .map(|name| serde_json::from_value::<VolumeSnapshotDeltaStatus>(status(name)).unwrap());
        assert_eq!(types, example);
        assert_eq!((types.next, types.changed_blocks[0].block_size_bytes), (3, 524_288));
        let written = serde_json::to_value(&types).unwrap();
        assert!(written.get("changedBlocks").is_some() && written["state"] == "Continue");
    }
}
