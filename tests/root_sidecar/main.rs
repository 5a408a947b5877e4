//! The sidecar against the real thing: a real API server with real tokens and roles, the released
//! snapshot-controller and csi-snapshotter, the driver of this project on real loop devices.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod answers;
mod rig;

use std::process::ExitCode;

macro_rules! suite {
    ($($module:ident: $($test:ident)*;)*) => { &[$($((stringify!($test), $module::$test),)*)*] };
}

fn main() -> ExitCode {
    cluster::suite::run(suite! {
        answers:
            allocated_blocks_are_those_that_the_driver_reports
            changed_blocks_are_found_from_a_handle_and_from_a_name
            a_name_that_exists_wins_over_a_handle
            an_empty_volume_and_no_change_still_tell_style_and_capacity
            an_answer_starts_where_it_is_asked_to_and_comes_in_the_portions_asked_for
            a_base_may_be_deleted_or_on_its_way_out;
    })
}
