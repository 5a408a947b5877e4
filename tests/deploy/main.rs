//! deploy/ on a real Kubernetes API server of its own: manifests are installed under the names that they ship with, so
//! these tests leave objects that other tests would meet.

mod installation;
mod manifests;
