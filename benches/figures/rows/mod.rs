//! The rows of the table.

pub mod backup;
pub mod catalog;
pub mod changes;
pub mod databases;
pub mod extents;
pub mod fio;
pub mod large;
pub mod memory;
pub mod month;
pub mod pods;
pub mod proxy;
pub mod repository;
pub mod sidecar;
pub mod sizes;
pub mod stream;
pub mod ten;
pub mod writers;
