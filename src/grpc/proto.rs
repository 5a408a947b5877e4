//! Generated gRPC code: messages, clients and servers of the files in csi-spec/, by protobuf
//! package. `make names` generates it again (tests/no_root/generated.rs). It guarantees only the
//! wire format. The .proto files define the meaning of fields; services validate arguments.
//!
//! `{:?}` prints a request completely, with its secrets: log handles, never messages.

/// Package `csi`.
pub mod csi {
    /// Package `csi.v1`: CSI v1.13, the parts of v1.12 that it removed, and the extensions of
    /// KEP-3314 and KEP-2857.
    pub mod v1 {
        // Generated code.
        #![allow(clippy::all)]
        include!("generated/csi.v1.rs");
        include!("generated/servers/csi.v1.rs");
    }
}

/// Package `snapshotmetadata`: the Kubernetes SnapshotMetadata API (KEP-3314).
pub mod snapshotmetadata {
    #![allow(clippy::all)]
    include!("generated/snapshotmetadata.rs");
    include!("generated/servers/snapshotmetadata.rs");
}

/// Package `snapshotsession`: the SnapshotMetadata API with session tokens (KEP-3314, session
/// design).
pub mod snapshotsession {
    #![allow(clippy::all)]
    include!("generated/snapshotsession.rs");
    include!("generated/servers/snapshotsession.rs");
}

/// Package `crust`: the Runtime API of crust_ops (KEP-2857).
pub mod crust {
    #![allow(clippy::all)]
    include!("generated/crust.rs");
    include!("generated/servers/crust.rs");
}

/// Package `csiloopback.admin`.
pub mod admin {
    /// Package `csiloopback.admin.v1`: this project's own services to administer a running driver.
    pub mod v1 {
        #![allow(clippy::all)]
        include!("generated/csiloopback.admin.v1.rs");
        include!("generated/servers/csiloopback.admin.v1.rs");
    }
}

/// Encoded `google.protobuf.FileDescriptorSet` of csi-spec/ and its imports, without comments.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/descriptors.bin");
