//! Reports errors on stderr, and in the log file in which the caller expects the errors of the next
//! runtime, in that runtime's format.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::SystemTime;

use super::command_line::Invocation;

pub fn error(invocation: &Invocation, message: &str) {
    eprintln!("{}: {message}", super::PROGRAM);
    let Some(path) = &invocation.log else { return };
    let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let line = match invocation.log_json {
        true => serde_json::json!({"level": "error", "msg": message, "time": time}).to_string(),
        false => format!("time={time:?} level=error msg={message:?}"),
    };
    let opened = OpenOptions::new().append(true).create(true).mode(0o644).open(path);
    // If this fails, the error is still on stderr.
    let _ = opened.and_then(|mut log| log.write_all(format!("{line}\n").as_bytes()));
}
