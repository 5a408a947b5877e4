//! Fail points ([`common::fail_point`]) that return the backend's error type.

use super::error::Result;
pub use common::fail_point::*;

/// Meets a point, as a step of an operation.
#[cfg(not(any(test, feature = "failpoints")))]
#[inline(always)]
pub fn reach(_name: &'static str) -> Result<()> {
    Ok(())
}

/// Meets a point, as a step of an operation.
#[cfg(any(test, feature = "failpoints"))]
pub fn reach(name: &'static str) -> Result<()> {
    use super::error::Context;
    hit(name).context(|| format!("fail point {name}"))
}
