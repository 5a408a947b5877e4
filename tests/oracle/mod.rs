//! The oracle: sequences of operations are run on a driver, or on its backend, and mirrored in memory;
//! what it answers is held against what really differs.
//!
//! | module | owns |
//! |---|---|
//! | `operation` | what can be done, drawn at random |
//! | `explore` | running many sequences, and cutting one that fails down to what it takes to fail |
//! | `world` | a run: operations done to a subject and to the mirror at once |
//! | `model`, `files` | the mirror: what volumes hold and held |
//! | `laws` | what has to hold of every answer |
//! | `subject`, `socket` | what is put to the test: the backend in this process, the binary behind its socket |

pub mod explore;
pub mod files;
pub mod laws;
pub mod model;
pub mod operation;
pub mod socket;
pub mod subject;
pub mod world;
