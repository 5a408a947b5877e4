//! Several pools on one machine share its loop devices, and none affects another's.

use support::*;

/// Concurrent attaching and detaching passes devices from one pool to another at the kernel's
/// speed. A pool that detaches a device must not detach one that another pool has just attached.
#[test]
#[ignore = "full tier"]
fn concurrent_pools_never_use_each_others_devices() {
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
