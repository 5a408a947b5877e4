//! Administration of the pool of a running driver: the PoolAdmin service and its commands.

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::admin::v1 as admin;
use serde_json::Value;
use support::driver::*;
use support::{GIB, MIB, pattern, read_all, write_direct};
use tonic::Code;

fn grow(size_bytes: u64) -> admin::GrowPoolRequest {
    admin::GrowPoolRequest { size_bytes }
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{name}: {value}"))
}

#[test]
fn the_pool_commands_work_with_attached_volumes() {
    let Some(mut driver) = driver_with(PoolKind::Image, &["--pool-size", "400Mi"]) else { return };
    let volume = driver.volume("v", MIB, block());
    let device = driver.publish(&volume, &block());
    write_direct(&device, 0, &pattern(1, MIB as usize));
    let before = driver.cli_json(&["pool", "status"]);
    assert_eq!(
        (&before["kind"], &before["reason"]),
        (&"image".into(), &"requested by --pool".into())
    );
    assert_eq!(number(&before["image"], "size_bytes"), 400 * MIB);
    assert_eq!(before["image"]["allocated"], true);
    assert!(number(&before["image"], "available_below_bytes") > 0);
    assert!((300 * MIB..400 * MIB).contains(&number(&before, "total_bytes")), "{before}");
    assert_eq!((number(&before, "provisioned_bytes"), &before["abnormal"]), (MIB, &false.into()));
    assert!(before["overcommit"].as_f64().unwrap() >= 1.0, "{before}");
    assert!(number(&before, "maximum_volume_bytes") > 0, "{before}");
    for _ in 0..2 {
        let grown = driver.cli_json(&["pool", "grow", "--size", "600Mi"]);
        assert_eq!(number(&grown["image"], "size_bytes"), 600 * MIB);
        assert!(number(&grown, "total_bytes") >= number(&before, "total_bytes") + 190 * MIB);
        assert!(
            number(&grown, "available_bytes") >= number(&before, "available_bytes") + 180 * MIB
        );
    }
    let shown = driver.cli(&["pool", "status"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("600Mi (629,145,600 bytes), allocated"), "{shown}");
    assert!(shown.contains("the pool is healthy") && shown.contains("overcommit"), "{shown}");
    assert!(
        shown.contains("4Ki (4,096 bytes)") && number(&before, "block_size_bytes") == 4096,
        "{shown}"
    );
    assert_eq!(read_all(&device), pattern(1, MIB as usize));
    driver.refused(grow(500 * MIB), Code::OutOfRange, "cannot shrink");
    driver.refused(grow(0), Code::InvalidArgument, "size_bytes");
    driver.refused(grow(u64::MAX), Code::InvalidArgument, "size_bytes");
    driver.refused(grow(1 << 60), Code::ResourceExhausted, "the filesystem of");
    let refused = driver.cli(&["pool", "grow", "--size", "500Mi"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("OUT_OF_RANGE"), "{said}");
    // Started again with the original --pool-size 400Mi.
    driver.restart();
    assert_eq!(driver.ok(admin::GetPoolRequest {}).image.unwrap().size_bytes, 600 * MIB);
    driver.restart_with(&["--pool-size", "700Mi"]);
    assert_eq!(driver.ok(admin::GetPoolRequest {}).image.unwrap().size_bytes, 700 * MIB);
    write_direct(&device, 0, &pattern(2, MIB as usize));
    driver.take_down(&volume);
    assert!(driver.log().contains("grew the pool"));
}

#[test]
fn growing_a_pool_without_an_image_names_the_filesystem() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let pool = driver.ok(admin::GetPoolRequest {});
    assert_eq!((pool.kind.as_str(), &pool.image), ("copy", &None));
    driver.refused(grow(GIB), Code::FailedPrecondition, "grow that");
    let shown = driver.cli(&["pool", "status"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let words: Vec<&str> = shown.split_whitespace().collect();
    assert!(words.starts_with(&["kind", "copy", "reason", "requested", "by", "--pool"]), "{shown}");
    assert!(!shown.contains("image"), "{shown}");
}
