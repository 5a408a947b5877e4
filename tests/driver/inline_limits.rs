//! Limits of inline volumes on a node, also for concurrent requests, and many concurrent publishes
//! without a refusal.

use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use csi_loopback::backend::{
    Access, AccessMode, Capability, Content, CreateVolume, Error, InlineRequest, PoolKind,
    PublishInline, Result as Answer, check,
};
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::full::{exhausted, fill};
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::{GIB, MIB, Pool, have_root, path};
use tonic::Code;

fn with_flags(flags: &[&str], run: impl FnOnce(&mut Driver)) {
    if have_root() {
        run(&mut Driver::with(PoolKind::Image, flags));
    }
}

fn refused_for(driver: &Driver, request: csi::NodePublishVolumeRequest, flag: &str) {
    let target = request.target_path.clone();
    driver.refused(request, Code::ResourceExhausted, flag);
    assert!(!Path::new(&target).exists(), "a refusal leaves nothing");
}

#[test]
fn exceeding_an_inline_limit_names_the_flag() {
    let flags = [
        "--inline-max-size=64Mi",
        "--inline-max-volumes=3",
        "--inline-max-total=100Mi",
        "--inline-max-memory=20Mi",
    ];
    with_flags(&flags, |driver| {
        let volume = |name| pod_volume(driver, "uid", name);
        let (a, b, c, d) = (volume("a"), volume("b"), volume("c"), volume("d"));
        refused_for(driver, a.publishing(&[("size", "65Mi")]), "--inline-max-size");
        let memory = [("size", "21Mi"), ("medium", "Memory")];
        refused_for(driver, a.publishing(&memory), "--inline-max-memory");
        driver.ok(a.publishing(&[("size", "64Mi")]));
        refused_for(driver, b.publishing(&[("size", "40Mi")]), "--inline-max-total");
        driver.ok(b.publishing(&[("size", "36Mi")]));
        driver.ok(a.publishing(&[("size", "64Mi")]));
        refused_for(driver, c.publishing(&[("size", "1Mi")]), "--inline-max-total");
        driver.unpublish(&a.handle, &a.target);
        driver.ok(c.publishing(&[("size", "1Mi")]));
        driver.ok(d.publishing(&[("size", "1Mi")]));
        refused_for(driver, a.publishing(&[("size", "1Mi")]), "--inline-max-volumes");
        driver.unpublish(&d.handle, &d.target);
        // Without a size, the volume is at most as large as the limit.
        driver.unpublish(&b.handle, &b.target);
        driver.ok(b.publishing(&[]));
        let at = b.target.to_str().unwrap();
        let usage = driver.ok(stats(&b.handle, at)).usage;
        assert!(usage.iter().any(|one| (40 * MIB as i64..=64 * MIB as i64).contains(&one.total)));
    });
}

#[test]
fn capacity_includes_inline_volumes() {
    let flags = ["--pool-size", "1Gi", "--overcommit", "3"];
    with_flags(&flags, |driver| {
        let maximum = || {
            let answer = driver.ok(csi::GetCapacityRequest::default());
            answer.maximum_volume_size.unwrap() as u64
        };
        let before = maximum();
        let volume = pod_volume(driver, "uid", "v");
        driver.ok(volume.publishing(&[("size", "96Mi")]));
        assert_eq!(maximum(), before - 96 * MIB);
        driver.unpublish(&volume.handle, &volume.target);
        assert_eq!(maximum(), before);
    });
}

/// A volume of one pod with this size in bytes.
fn publish(pool: &Pool, name: &str, bytes: u64) -> Answer<()> {
    let access = Access::Mount { fs_type: None, flags: Vec::new(), group: None };
    let request = InlineRequest {
        size_bytes: Some(bytes),
        capability: Capability { access, mode: AccessMode::SingleNodeWriter },
        readonly: false,
        in_memory: false,
        read_only_content: false,
        sector_size: Default::default(),
        deferred: None,
    };
    let (target, content) = (pool.scratch().join(name), Content::default());
    let publish =
        PublishInline { handle: name, target: &target, request: &request, content: &content };
    pool.backend().publish_inline(&publish)
}

fn unpublish(pool: &Pool, name: &str) {
    pool.backend().unpublish(name, &pool.scratch().join(name)).unwrap();
}

#[test]
fn concurrent_publishes_respect_the_inline_limit() {
    if !have_root() {
        return;
    }
    for (most, total) in [(5, None), (100, Some(5 * MIB + MIB / 2))] {
        let pool = Pool::with(PoolKind::Image, |config| {
            config.inline.max_volumes = most;
            config.inline.max_total = total;
        });
        let together = Barrier::new(16);
        let ask = |number: u32| {
            let name = format!("v{number}");
            together.wait();
            let answer = publish(&pool, &name, MIB);
            (name, answer)
        };
        let ask = &ask;
        let answers: Vec<(String, Answer<()>)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|number| scope.spawn(move || ask(number))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let usage = pool.backend().inline_usage().unwrap();
        let made = answers.iter().filter(|(_, answer)| answer.is_ok());
        made.clone().for_each(|(name, _)| unpublish(&pool, name));
        assert_eq!((made.count(), usage), (5, (5, 5 * MIB, 0)), "{answers:?}");
        for (_, answer) in &answers {
            match answer {
                Ok(()) => {}
                Err(Error::Exhausted(message)) => assert!(message.contains("--inline-max-")),
                Err(error) => panic!("{error:?}"),
            }
        }
        assert_eq!(pool.backend().inline_usage().unwrap(), (0, 0, 0));
    }
}

#[test]
fn a_full_pool_refuses_inline_volumes_without_leftovers() {
    if !have_root() {
        return;
    }
    let mut pool = Pool::with(PoolKind::Image, |config| config.pool_size = Some(400 * MIB));
    publish(&pool, "before", 16 * MIB).unwrap();
    let request = support::request();
    let filler = CreateVolume { name: "filler".to_owned(), request };
    let filler = pool.backend().create_volume(&filler).unwrap();
    let device = pool.attach(&filler.id);
    fill(&device.target, 0);
    for size in [MIB, 64 * MIB] {
        exhausted(publish(&pool, "new", size), "an inline volume");
        assert!(!pool.scratch().join("new").exists());
    }
    assert_eq!(pool.backend().inline_usage().unwrap().0, 1);
    // Existing volumes can still be removed.
    unpublish(&pool, "before");
    pool.detach(&device);
    pool.backend().delete_volume(&filler.id).unwrap();
    wait_for("space is available again", || {
        pool.backend().capacity().unwrap().available > 200 * MIB
    });
    publish(&pool, "new", MIB).unwrap();
    unpublish(&pool, "new");
    pool.stop();
    assert_eq!(check::check(pool.data_dir()).unwrap().findings, []);
}

/// Makes all calls concurrently and returns their durations.
fn all_at_once<R: Rpc + Send>(driver: &Driver, requests: Vec<R>) -> f64
where
    R::Response: Send,
{
    let begun = Instant::now();
    thread::scope(|scope| {
        let calls: Vec<_> = requests
            .into_iter()
            .map(|request| scope.spawn(move || driver.call(request).map(drop)))
            .collect();
        for call in calls {
            call.join().unwrap().unwrap();
        }
    });
    begun.elapsed().as_secs_f64()
}

#[test]
#[ignore = "full tier"]
fn two_hundred_inline_volumes_are_published_concurrently() {
    with_flags(&[], |driver| {
        let pod = |number| format!("pod-{number}");
        let volumes: Vec<PodVolume> =
            (0..200).map(|number| pod_volume(driver, &pod(number), "scratch")).collect();
        let publishing = |volume: &PodVolume| volume.publishing(&[("size", "16Mi")]);
        let made = all_at_once(driver, volumes.iter().map(publishing).collect());
        for (number, volume) in volumes.iter().enumerate() {
            assert!(is_mounted(&volume.target));
            std::fs::write(volume.file("number"), number.to_string()).unwrap();
        }
        let again = all_at_once(driver, volumes.iter().map(publishing).collect());
        for (number, volume) in volumes.iter().enumerate() {
            let found = std::fs::read_to_string(volume.file("number")).unwrap();
            assert_eq!(found, number.to_string(), "each pod has its own");
        }
        let unpublishing = |volume: &PodVolume| unpublishing(&volume.handle, path(&volume.target));
        let gone = all_at_once(driver, volumes.iter().map(unpublishing).collect());
        assert!(volumes.iter().all(|volume| !volume.target.exists()));
        let room = driver.ok(csi::GetCapacityRequest::default());
        assert!(room.available_capacity as u64 > 8 * GIB, "{room:?}");
        assert!(driver.stop().success());
        assert_eq!(check::check(&driver.data_dir()).unwrap().findings, []);
        support::report(&format!(
            "200 published in {made:.1} s, again in {again:.1} s, unpublished in {gone:.1} s"
        ));
    });
}

#[test]
fn concurrent_publishes_of_one_handle_create_one_volume() {
    with_flags(&[], |driver| {
        let volume = pod_volume(driver, "uid", "v");
        for _ in 0..3 {
            let codes: Vec<Code> = thread::scope(|scope| {
                let call = || match driver.call(volume.publishing(&[("size", "16Mi")])) {
                    Ok(_) => Code::Ok,
                    Err(status) => status.code(),
                };
                let calls: Vec<_> = (0..20).map(|_| scope.spawn(call)).collect();
                calls.into_iter().map(|call| call.join().unwrap()).collect()
            });
            assert!(codes.contains(&Code::Ok), "{codes:?}");
            assert!(codes.iter().all(|code| [Code::Ok, Code::Aborted].contains(code)), "{codes:?}");
            assert_eq!(mounts_at(&volume.target).len(), 1);
            driver.unpublish(&volume.handle, &volume.target);
            assert!(!volume.target.exists());
        }
    });
}
