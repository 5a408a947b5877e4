//! Tasks of tokio, boxed: tokio's code for a task is compiled once for each type of result, and not
//! for each task, which made a tenth of all functions.

use std::pin::Pin;

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};

/// Starts a task.
pub fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn::<Pin<Box<dyn Future<Output = T> + Send>>>(Box::pin(work))
}

/// Runs work on a thread where it may block, to its end even if the receiver is dropped. The
/// receiver gets no result if the work panics or the process is exiting.
pub fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (done, result) = oneshot::channel();
    spawn_blocking::<Box<dyn FnOnce() + Send>, ()>(Box::new(move || drop(done.send(work()))));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn blocking_work_has_its_result_or_none_after_a_panic() {
        assert_eq!(blocking(|| 7).await, Ok(7));
        assert!(blocking(|| -> u8 { panic!("on purpose") }).await.is_err());
    }
}
