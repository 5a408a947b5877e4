//! A killed driver: pods continue, and the next driver takes over.

use std::fs::{self, File};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use support::driver::*;
use support::{BLOCK, MIB, path, pattern, write_direct};
use tonic::Code;

#[test]
fn io_continues_after_a_kill_and_the_next_driver_takes_over() {
    for_each_driver(|driver| {
        let (volume, raw) =
            (driver.volume("f", 64 * MIB, mounted("")), driver.volume("r", MIB, block()));
        let target = driver.publish(&volume, &mounted(""));
        let device = driver.publish(&raw, &block());
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        let snapshot = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let number = written.load(Ordering::Relaxed) + 1;
                    let mut file = File::create(target.join("counter")).unwrap();
                    file.write_all(&number.to_le_bytes()).unwrap();
                    file.sync_all().unwrap();
                    write_direct(&device, number % 8 * BLOCK, &pattern(number, BLOCK as usize));
                    written.store(number, Ordering::Relaxed);
                }
            });
            let assert_writes_continue = || {
                let before = written.load(Ordering::Relaxed);
                wait_for("the pod continues to write", || {
                    written.load(Ordering::Relaxed) > before + 1
                });
            };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                assert_writes_continue();
                driver.kill();
                assert_writes_continue();
                driver.start_again();
                assert_writes_continue();
                let snapshot = driver.snapshot("a", &volume);
                assert_writes_continue();
                snapshot
            }));
            stop.store(true, Ordering::Relaxed);
            result
        })
        .unwrap();
        // The next driver has the same mounts and devices.
        driver.stage(&volume, &mounted(""));
        driver.ok(driver.publishing(&volume, &target, &mounted("")));
        assert_eq!(mounts_at(&target).len(), 1);
        driver.refused(delete_volume(&raw), Code::FailedPrecondition, "unpublish");
        assert!(!driver.ok(allocated(&snapshot)).extents().is_empty());
        let last = written.load(Ordering::Relaxed);
        assert_eq!(fs::read(target.join("counter")).unwrap(), last.to_le_bytes());
        for id in [&volume, &raw] {
            driver.take_down(id);
            driver.ok(delete_volume(id));
        }
    });
}

#[test]
fn a_killed_node_call_converges_when_repeated() {
    with_driver(|driver| {
        for round in 0..12u64 {
            let volume = driver.volume(&format!("v{round}"), 32 * MIB, mounted(""));
            let target = driver.target(&volume);
            let steps = |driver: &Driver| -> Result<(), tonic::Status> {
                driver.call(driver.staging_of(&volume, &mounted("")))?;
                driver.call(driver.publishing(&volume, &target, &mounted("")))?;
                driver.call(unpublishing(&volume, path(&target)))?;
                driver.call(unstaging(&volume, path(&driver.staging(&volume)))).map(drop)
            };
            std::thread::scope(|scope| {
                scope.spawn(|| steps(driver));
                std::thread::sleep(std::time::Duration::from_millis(4 * round));
                driver.signal(nix::sys::signal::Signal::SIGKILL);
            });
            driver.wait();
            driver.start_again();
            let target = driver.publish(&volume, &mounted(""));
            assert_eq!(mounts_at(&target).len(), 1);
            fs::write(target.join("file"), "x").unwrap();
            driver.take_down(&volume);
            driver.ok(delete_volume(&volume));
        }
    });
}
