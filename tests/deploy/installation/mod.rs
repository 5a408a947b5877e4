//! What is installed from deploy/ and uninstalled as docs/deploy.md says leaves no object. libtest runs tests in the order
//! of their names: these come before those of `manifests`, whose objects stay.

mod admission;
mod aggregated;
mod sessions;
