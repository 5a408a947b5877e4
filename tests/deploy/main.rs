//! Tests of deploy/ on a separate API server: they install manifests under the names that
//! these have, so their objects would affect other tests.

mod manifests;
