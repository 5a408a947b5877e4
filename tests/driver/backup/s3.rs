//! A repository in a bucket, with a local server.

use std::fs;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use support::cluster::programs::free_port;
use support::driver::*;
use support::{MIB, go_tool, kernel, path};

use super::Rig;

const SECRET: &str = "a-secret-that-no-output-has";

/// A server that holds its buckets in memory.
pub struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts one; reports if the machine cannot have it.
    pub fn start() -> Option<Self> {
        let program = go_tool("gofakes3")?;
        let address = format!("127.0.0.1:{}", free_port());
        let child = Command::new(program)
            .args(["-quiet", "-backend", "memory", "-initialbucket", "bucket", "-host", &address])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, address };
        kernel::wait_for("the S3 server answers", || TcpStream::connect(&server.address).is_ok());
        Some(server)
    }

    pub fn environment(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_bucket_holds_the_same_backups_as_a_directory() {
    with_driver(|driver| {
        let Some(server) = Server::start() else { return };
        let mut rig = Rig::new(driver, "v", 24 * MIB);
        rig.repository[1] = "s3://bucket/some/place".to_owned();
        rig.environment = server.environment();
        rig.environment.push(("AWS_ACCESS_KEY_ID".to_owned(), "id".to_owned()));
        rig.environment.push(("AWS_SECRET_ACCESS_KEY".to_owned(), SECRET.to_owned()));
        rig.snapshot("a", 100);
        rig.create("a", &[]);
        rig.snapshot("b", 30);
        let second = rig.create("b", &["--base", "auto"]);
        assert_eq!(second["kind"], "incremental");
        rig.verify();
        rig.restores("b");
        let to = driver.scratch().join("copy");
        rig.json(&["backup", "copy", "--to", path(&to)]);
        rig.snapshot("c", 3);
        rig.create("c", &["--full"]);
        let pruned = rig.json(&["backup", "prune", "--keep-last", "1"]);
        assert_eq!(pruned["removed"].as_array().unwrap().len(), 2);
        rig.verify();
        rig.restores("c");
        rig.repository[1] = path(&to).to_owned();
        rig.restores("a");
    });
}

#[test]
#[ignore = "full tier"]
fn credentials_come_from_files_and_are_in_no_output() {
    with_driver(|driver| {
        let Some(server) = Server::start() else { return };
        let secret = driver.scratch().join("secret");
        fs::create_dir(&secret).unwrap();
        fs::write(secret.join("AWS_ACCESS_KEY_ID"), "id\n").unwrap();
        fs::write(secret.join("AWS_SECRET_ACCESS_KEY"), SECRET).unwrap();
        let mut rig = Rig::new(driver, "v", MIB);
        rig.repository[1] = "s3://bucket/files".to_owned();
        rig.repository.extend(["--s3-credentials".to_owned(), path(&secret).to_owned()]);
        rig.environment = server.environment();
        rig.snapshot("a", 5);
        rig.create("a", &[]);
        rig.restores("a");
        // Of a copy, they are for the bucket.
        let copy = driver.scratch().join("copy");
        rig.json(&["backup", "copy", "--to", path(&copy)]);
        rig.repository[1] = path(&copy).to_owned();
        rig.json(&["backup", "copy", "--to", "s3://bucket/again"]);
        rig.repository[1] = "s3://bucket/again".to_owned();
        rig.restores("a");
        // A bucket that does not exist, and a server that is gone: errors that name neither.
        rig.repository[1] = "s3://no-such-bucket".to_owned();
        let missing = rig.run(&["backup", "create", "a"]);
        drop(server);
        for output in [missing, rig.run(&["backup", "list"])] {
            let said =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
            assert!(!output.status.success() && !said.concat().contains(SECRET), "{said:?}");
        }
    });
}
