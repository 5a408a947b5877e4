//! The node proxy with pods of a real API server: added fields, stored volumes, refusals and
//! reports. The driver is this project's, or a fake one that records calls.

mod capabilities;
mod confined;
mod memory;
mod opt_in;
mod reports;
