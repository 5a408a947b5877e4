//! The generated gRPC code: messages, clients and servers of every file in csi-spec/, laid out by
//! protobuf package. It promises the wire format and no more: what a field means is written in the
//! .proto files, and checking arguments is left to the services.
//!
//! Requests print whole with `{:?}`, secrets included: log their handles, never the messages.

/// Package `csi`.
pub mod csi {
    /// Package `csi.v1`: CSI v1.13 and what v1.12 had besides, and what KEP-3314 and KEP-2857 add to it.
    pub mod v1 {
        // Generated; variant sizes and the like are not ours to choose.
        #![allow(clippy::all)]
        tonic::include_proto!("csi.v1");
        include!(concat!(env!("OUT_DIR"), "/servers/csi.v1.rs"));
    }
}

/// Package `snapshotmetadata`: the Kubernetes SnapshotMetadata API (KEP-3314).
pub mod snapshotmetadata {
    #![allow(clippy::all)]
    tonic::include_proto!("snapshotmetadata");
    include!(concat!(env!("OUT_DIR"), "/servers/snapshotmetadata.rs"));
}

/// Package `snapshotsession`: the SnapshotMetadata API with session tokens (KEP-3314, session design).
pub mod snapshotsession {
    #![allow(clippy::all)]
    tonic::include_proto!("snapshotsession");
    include!(concat!(env!("OUT_DIR"), "/servers/snapshotsession.rs"));
}

/// Package `crust`: the Runtime API of crust_ops (KEP-2857).
pub mod crust {
    #![allow(clippy::all)]
    tonic::include_proto!("crust");
    include!(concat!(env!("OUT_DIR"), "/servers/crust.rs"));
}

/// Package `csiloopback.admin`.
pub mod admin {
    /// Package `csiloopback.admin.v1`: administration of a running driver, of this project's own.
    pub mod v1 {
        #![allow(clippy::all)]
        tonic::include_proto!("csiloopback.admin.v1");
        include!(concat!(env!("OUT_DIR"), "/servers/csiloopback.admin.v1.rs"));
    }
}

pub mod former;

/// Encoded `google.protobuf.FileDescriptorSet` of csi-spec/ and its imports, with comments.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("csi_descriptor");
