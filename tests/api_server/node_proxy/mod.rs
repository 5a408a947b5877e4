//! The node proxy with pods of a real API server: what it adds to kubelet's calls, remembers, refuses and tells. Behind it is the driver
//! of this project, or one of somebody else's that keeps what it is asked.

mod capabilities;
mod confined;
mod memory;
mod opt_in;
mod reports;
