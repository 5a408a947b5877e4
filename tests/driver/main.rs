//! The driver and the other roles of a node, over their sockets: real pools, loop devices and
//! mounts, as root, without Kubernetes.

mod backup;
mod bases;
mod clients;
mod commands;
mod conditions;
mod conformance;
mod controller;
mod defer_driver;
mod deferred;
mod descriptors;
mod dev;
mod faults;
mod foreign_devices;
mod groups;
mod growth;
mod health;
mod hostile_requests;
mod inline;
mod inline_content;
mod inline_limits;
mod inline_trouble;
mod lists;
mod logs;
mod many_pools;
mod metadata;
mod metadata_socket;
mod node;
mod node_proxy_forwarding;
mod pool_admin;
mod process;
mod runtime_ops;
mod session_driver;
mod snapshot_deltas;
mod snapshot_mount;
mod takeover;
