use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::super::error::Error;
use super::super::sys;
use super::{FreezeGuard, Guard, Message, listen};

const LONG: Duration = Duration::from_secs(600);

/// A descriptor in place of a directory, and the other end of its connection, which ends when all
/// copies of the descriptor are closed.
fn directory() -> (File, UnixStream) {
    let (peer, directory) = UnixStream::pair().unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (OwnedFd::from(directory).into(), peer)
}

fn guard_at(place: &TempDir) -> PathBuf {
    let path = place.path().join("guard.sock");
    listen(UnixListener::bind(&path).unwrap()).unwrap();
    path
}

#[test]
fn messages_round_trip_and_invalid_ones_are_rejected() {
    for message in [Message::Hold { id: u64::MAX, seconds: 40 }, Message::Forget { id: 7 }] {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
    let mut bytes = Message::Forget { id: 7 }.encode();
    assert_eq!(Message::decode(&bytes[..15]), None);
    for at in 0..5 {
        let before = std::mem::replace(&mut bytes[at], b'x');
        assert_eq!(Message::decode(&bytes), None, "byte {at}");
        bytes[at] = before;
    }
}

#[test]
fn no_descriptor_remains_after_a_hold() {
    let place = TempDir::new().unwrap();
    let guard = Guard::new(FreezeGuard::Socket(guard_at(&place)));
    for _ in 0..3 {
        let ((first, peer), (second, second_peer)) = (directory(), directory());
        let other = directory();
        let kept = guard.hold(std::slice::from_ref(&other.0), LONG).unwrap().unwrap();
        let hold = guard.hold(&[first, second], LONG).unwrap().unwrap();
        drop(hold);
        // The read times out if a copy is still open.
        for mut peer in [peer, second_peer] {
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        }
        drop((kept, other));
    }
}

#[test]
fn a_missing_guard_is_unavailable_until_it_returns() {
    let place = TempDir::new().unwrap();
    let path = place.path().join("guard.sock");
    let guard = Guard::new(FreezeGuard::Socket(path.clone()));
    let (held, _peer) = directory();
    let refused = |words: &str| match guard.hold(std::slice::from_ref(&held), LONG) {
        Err(Error::Unavailable(message)) => assert!(message.contains(words), "{message}"),
        other => panic!("{other:?}"),
    };
    refused("nothing was frozen");
    // A listener that closes the connection without a response, or with an invalid one.
    let listener = UnixListener::bind(&path).unwrap();
    let ends = thread::spawn(move || {
        for response in [&b""[..], b"?"] {
            let (mut connection, _) = listener.accept().unwrap();
            let _ = connection.write_all(response);
        }
        std::fs::remove_file(&path).unwrap();
        listen(UnixListener::bind(&path).unwrap()).unwrap();
    });
    refused("guard.sock");
    refused("guard.sock");
    ends.join().unwrap();
    assert!(guard.hold(std::slice::from_ref(&held), LONG).unwrap().is_some());
}

#[test]
fn an_empty_freeze_needs_no_guard() {
    let guard = Guard::new(FreezeGuard::Socket("/nonexistent/guard.sock".into()));
    assert!(guard.hold(&[], LONG).unwrap().is_none());
    let (held, _peer) = directory();
    assert!(Guard::new(FreezeGuard::None).hold(&[held], LONG).unwrap().is_none());
}

#[test]
fn an_invalid_message_ends_only_its_connection() {
    let place = TempDir::new().unwrap();
    let path = guard_at(&place);
    let (held, mut peer) = directory();
    let mut hostile = UnixStream::connect(&path).unwrap();
    let hold = Message::Hold { id: 1, seconds: 600 }.encode();
    assert_eq!(sys::send_with_descriptor(&hostile, &hold, Some(held.as_fd())).unwrap(), 16);
    hostile.read_exact(&mut [0]).unwrap();
    // A hold without a descriptor is refused, and the connection remains open.
    assert_eq!(sys::send_with_descriptor(&hostile, &hold, None).unwrap(), 16);
    let mut response = [0];
    hostile.read_exact(&mut response).unwrap();
    assert_eq!(&response, b"R");
    drop(held);
    hostile.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    assert_eq!(hostile.read(&mut [0]).unwrap(), 0);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    let (held, _peer) = directory();
    let guard = Guard::new(FreezeGuard::Socket(path));
    assert!(guard.hold(&[held], LONG).unwrap().is_some());
}

#[test]
fn a_hold_ends_at_its_deadline() {
    let place = TempDir::new().unwrap();
    let driver = UnixStream::connect(guard_at(&place)).unwrap();
    let (held, mut peer) = directory();
    let hold = Message::Hold { id: 1, seconds: 0 }.encode();
    let directory: OwnedFd = held.into();
    assert_eq!(sys::send_with_descriptor(&driver, &hold, Some(directory.as_fd())).unwrap(), 16);
    drop(directory);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    drop(driver);
}
