//! VolumeSnapshotDelta (KEP-3314, VolumeSnapshotDelta, "API Specification"): requests the blocks
//! that differ between two VolumeSnapshots of its namespace; the status has the result. It can only
//! be created and is never stored.
//!
//! The KEP's example and its Go types differ. docs/reference/aggregated-api.md describes the
//! choices: the types' `changedBlocks`, block numbers instead of bytes, states as strings.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::de::{Error as _, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

pub const GROUP: &str = "cbt.storage.k8s.io";
pub const VERSION: &str = "v1alpha1";
pub const API_VERSION: &str = "cbt.storage.k8s.io/v1alpha1";
pub const KIND: &str = "VolumeSnapshotDelta";
pub const PLURAL: &str = "volumesnapshotdeltas";

/// Default of `spec.limit`.
pub const DEFAULT_LIMIT: u64 = 256;

/// A request, and its result in the status.
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

/// The request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotDeltaSpec {
    /// Name of the VolumeSnapshot to compare with. Without it, all allocated blocks of the target
    /// are returned.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub base_volume_snapshot_name: String,
    /// Name of the VolumeSnapshot whose blocks are returned.
    pub target_volume_snapshot_name: String,
    /// Secret in this namespace that the CSI driver needs for the call. All its entries are passed.
    #[serde(
        default,
        alias = "volumeSnapshotDeltaSecretRef",
        alias = "VolumeSnapshotDeltaSecretRef",
        skip_serializing_if = "Option::is_none"
    )]
    pub secret_ref: Option<SecretReference>,
    /// Kind of metadata. The only value is "block".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Maximum number of blocks to return; 0 means 256. The server also has a maximum.
    #[serde(default, deserialize_with = "or_default")]
    pub limit: u64,
    /// Number of the first block to return: 0, or status.continue of the previous page.
    #[serde(default, deserialize_with = "or_default")]
    pub offset: u64,
}

/// Reference to a Secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SecretReference {
    /// Name of the Secret.
    pub name: String,
    /// Namespace of the Secret. It must be the VolumeSnapshotDelta's namespace, which is the
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotDeltaStatus {
    /// Changed blocks in ascending order. All blocks of one response have the same size.
    #[serde(
        default,
        alias = "changedBlockDeltas",
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub changed_blocks: Vec<ChangedBlock>,
    /// Error of the driver, if the state is Failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Completed: no blocks follow. Continue: more blocks follow, starting at `continue`. Failed:
    /// see `error`.
    #[serde(default)]
    pub state: VolumeSnapshotDeltaState,
    /// Maximum number of blocks in this response.
    #[serde(default)]
    pub limit: u64,
    /// Number of the block at which this response starts.
    #[serde(default)]
    pub offset: u64,
    /// Offset of the next request, if the state is Continue; otherwise 0.
    #[serde(default, rename = "continue")]
    pub next: u64,
    /// Size of the volume in bytes, if the driver reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_size_bytes: Option<u64>,
}

/// A changed block.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChangedBlock {
    /// Number of the block, which starts at byte offset * blockSizeBytes.
    pub offset: u64,
    /// Size of the block in bytes.
    pub block_size_bytes: u64,
    /// Token to read the block's content from the driver, if the driver provides one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_token: Option<DataToken>,
}

/// A driver's token for the content of a block.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DataToken {
    /// The token as the driver returns it.
    pub token: String,
    /// Time of issuance (RFC 3339).
    pub issuance_time: String,
    /// Validity as a duration, such as 3h0m0s.
    pub ttl: String,
}

/// `status.state`. A number in input is the index in the KEP's list.
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

/// Reads null as the default, because Go encodes empty values as null.
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
    fn the_keps_example_and_types_are_both_accepted() {
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
