//! Several pools on one machine share its loop devices, and none touches another's.

use support::*;

/// Attaching and detaching at the same time passes devices from one pool to another as fast as the
/// kernel can; whoever lets go of one must not let go of what somebody else has just attached.
#[test]
#[ignore = "full tier"]
fn pools_that_attach_and_detach_at_once_never_take_each_others_devices() {
    if !have_root() {
        return;
    }
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                let mut pool = Pool::new(ALL_KINDS[2]);
                let volume = pool.volume("v", 8 * MIB);
                for round in 0..150 {
                    let attached = pool.attach(&volume.id);
                    let data = pattern(thread * 1000 + round, BLOCK as usize);
                    write_direct(&attached.target, round * BLOCK, &data);
                    let read = read_all(&attached.target);
                    let at = (round * BLOCK) as usize;
                    assert_eq!(read.len() as u64, 8 * MIB, "thread {thread} round {round}");
                    assert!(read[at..at + data.len()] == data, "thread {thread} round {round}");
                    pool.detach(&attached);
                }
            });
        }
    });
}
