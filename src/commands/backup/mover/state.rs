//! What the status of a Job and of its pod mean. Only the mover's own container counts: a webhook
//! may have added others, which do not end with it.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, Pod};

use super::super::failure::FINAL;
use super::job::CONTAINER;
use crate::client::cluster::pods::container_state;

#[derive(Debug, PartialEq, Eq)]
pub enum State {
    /// The mover's container runs.
    Running,
    /// It does not run, and why.
    Waiting(String),
    /// It was killed, and its pod cannot be replaced.
    Held(String),
    Succeeded,
    Failed(String),
}

impl State {
    /// `pod`: the newest one.
    pub fn of(job: &Job, pod: Option<&Pod>) -> Self {
        let ended = pod.and_then(terminated);
        match (ended.map(|ended| ended.exit_code), outcome(job)) {
            (Some(0), _) | (_, Some(Ok(()))) => Self::Succeeded,
            (_, Some(Err(reason))) => Self::Failed(reason),
            (Some(code), None) => of_ended(pod, code),
            (None, None) => match pod {
                Some(pod) if is_running(pod) => Self::Running,
                Some(pod) => Self::Waiting(waiting(pod)),
                None => Self::Waiting(String::new()),
            },
        }
    }
}

fn of_ended(pod: Option<&Pod>, code: i32) -> State {
    let name = pod.map(name).unwrap_or_default();
    if FINAL.iter().any(|one| i32::from(*one) == code) {
        return State::Failed(format!("exit code {code}"));
    }
    let others: Vec<&str> = pod.into_iter().flat_map(others).collect();
    if others.is_empty() {
        return State::Waiting(format!("mover pod {name} ended with exit code {code}"));
    }
    State::Held(format!(
        "the mover in pod {name} ended with exit code {code}, and the pod does not end: container {} runs; repeat the \
         command, and keep other containers out of the pod (--pod-template has labels and annotations)",
        others.join(", ")
    ))
}

/// How a Job ended; `None` while it runs.
pub fn outcome(job: &Job) -> Option<Result<(), String>> {
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    let mut met = conditions.iter().filter(|condition| condition.status == "True");
    met.find_map(|condition| match condition.type_.as_str() {
        "Complete" => Some(Ok(())),
        "Failed" => {
            let message = condition.message.clone().unwrap_or_default();
            Some(Err(match condition.reason.as_deref() {
                Some("DeadlineExceeded") => format!("{message}; set a longer --mover-timeout"),
                _ => message,
            }))
        }
        _ => None,
    })
}

/// The exit code of the mover in a pod.
pub fn exit_code(pod: &Pod) -> Option<i32> {
    terminated(pod).map(|ended| ended.exit_code)
}

fn mover(pod: &Pod) -> Option<&ContainerState> {
    container_state(pod, CONTAINER)
}

fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    mover(pod)?.terminated.as_ref()
}

fn is_running(pod: &Pod) -> bool {
    mover(pod).is_some_and(|state| state.running.is_some())
}

/// The other containers that run.
fn others(pod: &Pod) -> impl Iterator<Item = &str> {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    all.filter_map(|one| {
        let runs = one.state.as_ref()?.running.is_some();
        (one.name != CONTAINER && runs).then_some(one.name.as_str())
    })
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Why the mover of a pod does not run.
fn waiting(pod: &Pod) -> String {
    let reason = of_init_container(pod).or_else(|| of_container(pod)).or_else(|| of_pod(pod));
    let reason = reason.unwrap_or_else(|| "Pending".to_owned());
    format!("mover pod {} is waiting, {reason}", name(pod))
}

/// A webhook may have added containers that run before the mover.
fn of_init_container(pod: &Pod) -> Option<String> {
    let all = pod.status.as_ref()?.init_container_statuses.iter().flatten();
    let mut unready = all.filter(|one| !one.ready && one.started != Some(true));
    unready.find_map(|one| {
        let state = one.state.as_ref()?;
        let waiting = state.waiting.as_ref().filter(|waiting| {
            waiting.reason.as_deref().is_some_and(|reason| reason != "PodInitializing")
        });
        match (waiting, &state.running) {
            (Some(waiting), _) => {
                let reason = reason(waiting.reason.as_deref(), waiting.message.as_deref());
                Some(format!("init container {}: {reason}", one.name))
            }
            (None, Some(_)) => Some(format!("init container {} has not ended", one.name)),
            (None, None) => None,
        }
    })
}

fn of_container(pod: &Pod) -> Option<String> {
    let waiting = mover(pod)?.waiting.as_ref()?;
    Some(reason(waiting.reason.as_deref(), waiting.message.as_deref()))
}

fn of_pod(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if let Some(why) = &status.reason {
        return Some(reason(Some(why), status.message.as_deref()));
    }
    let mut conditions = status.conditions.iter().flatten();
    let unmet = conditions.find(|one| one.status == "False" && one.message.is_some())?;
    Some(reason(unmet.reason.as_deref(), unmet.message.as_deref()))
}

fn reason(reason: Option<&str>, message: Option<&str>) -> String {
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    format!("{}{message}", reason.unwrap_or("Pending"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    }

    fn container(name: &str, state: Value) -> Value {
        json!({
            "name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": state,
        })
    }

    fn ended(code: i32) -> Value {
        container("mover", json!({"terminated": {"exitCode": code}}))
    }

    fn state(status: Value) -> State {
        State::of(&Job::default(), Some(&pod(status)))
    }

    #[test]
    fn only_the_movers_own_container_counts() {
        let proxy = container("istio-proxy", json!({"running": {}}));
        let with = |mover: Value| json!({"phase": "Running", "containerStatuses": [proxy, mover]});
        assert_eq!(state(with(ended(0))), State::Succeeded);
        assert!(matches!(state(with(ended(12))), State::Failed(_)));
        let State::Held(text) = state(with(ended(137))) else { panic!() };
        assert!(text.contains("137") && text.contains("istio-proxy"), "{text}");
        assert_eq!(state(with(container("mover", json!({"running": {}})))), State::Running);
        let waiting = json!({"waiting": {"reason": "ErrImagePull", "message": "no such image"}});
        let State::Waiting(text) = state(with(container("mover", waiting))) else { panic!() };
        assert!(text.ends_with("ErrImagePull: no such image"), "{text}");
        // Without others, the Job replaces it.
        let alone = state(json!({"phase": "Failed", "containerStatuses": [ended(137)]}));
        assert!(matches!(alone, State::Waiting(_)), "{alone:?}");
        assert_eq!(exit_code(&pod(with(ended(12)))), Some(12));
    }

    #[test]
    fn a_waiting_pod_has_its_reason() {
        let reason = |status| match state(status) {
            State::Waiting(text) => text,
            other => panic!("{other:?}"),
        };
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"});
        let found = reason(json!({"phase": "Pending", "conditions": [condition]}));
        assert!(found.ends_with("Unschedulable: no node"), "{found}");
        // kubelet has refused it.
        let found = reason(json!({"phase": "Failed", "reason": "OutOfcpu", "message": "too much"}));
        assert!(found.ends_with("OutOfcpu: too much"), "{found}");
        let mover = container("mover", json!({"waiting": {"reason": "PodInitializing"}}));
        let init = container("istio-init", json!({"running": {}}));
        let status = json!({"phase": "Pending", "containerStatuses": [mover], "initContainerStatuses": [init]});
        assert!(reason(status).contains("init container istio-init has not ended"));
    }

    #[test]
    fn a_job_that_took_too_long_names_the_flag() {
        let condition = json!({"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"});
        let job = serde_json::from_value(json!({"status": {"conditions": [condition]}})).unwrap();
        let State::Failed(reason) = State::of(&job, None) else { panic!() };
        assert_eq!(reason, "too long; set a longer --mover-timeout");
    }
}
