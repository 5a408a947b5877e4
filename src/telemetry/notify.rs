//! Reports readiness to systemd, for units of `Type=notify` (sd_notify(3)): a unit that follows this
//! one starts when its socket exists. Does nothing outside of systemd.

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::{env, io};

/// Reports that the process serves its sockets. A failure is logged: the service works without, and
/// systemd ends the unit after its start timeout.
pub fn ready() {
    if let Some(socket) = env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&socket, b"READY=1")
    {
        tracing::warn!(?socket, %error, "failed to report readiness to systemd");
    }
}

/// A path, or with a leading `@` an abstract name.
fn send(socket: &OsString, message: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message, &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_reaches_sockets_with_paths_and_names() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("csi-loopback-notify-{}", std::process::id());
        let bound = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, listening) in [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (format!("@{name}").into(), UnixDatagram::bind_addr(&bound).unwrap()),
        ] {
            send(&socket, b"READY=1").unwrap();
            let mut message = [0; 32];
            let length = listening.recv(&mut message).unwrap();
            assert_eq!(&message[..length], b"READY=1");
        }
        assert!(send(&"relative/or/missing".into(), b"READY=1").is_err());
    }
}
