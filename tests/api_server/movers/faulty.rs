//! The API server behind a proxy that answers some requests with errors, as an overloaded server or
//! a load balancer does: before or after the server has done what was requested.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use kube::Client;
use kube::client::Body;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::rig::Stage;

#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Answers with this status.
    Instead(u16),
    /// Forwards the request, and answers with this status.
    After(u16),
}

/// A method, a part of the path, what happens to such requests, and to how many.
pub type Rule = (&'static str, &'static str, Fault, usize);

pub struct Faulty {
    pub kubeconfig: PathBuf,
    rules: Arc<Mutex<Vec<Rule>>>,
    task: JoinHandle<()>,
}

impl Faulty {
    pub fn start(stage: &Stage<'_>, rules: impl Into<Vec<Rule>>) -> Self {
        let cluster = stage.cluster;
        let listener = cluster.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let kubeconfig = cluster.kubeconfig_at(&server, &stage.user);
        let (client, rules) = (cluster.client_as(&stage.user), Arc::new(Mutex::new(rules.into())));
        let served = Arc::clone(&rules);
        let task = cluster.spawn_task(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, client.clone(), Arc::clone(&served)));
            }
        });
        Self { kubeconfig, rules, task }
    }

    /// Whether all faults have happened.
    pub fn is_over(&self) -> bool {
        self.rules.lock().unwrap().iter().all(|(.., left)| *left == 0)
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One request for each connection.
async fn serve(mut stream: TcpStream, client: Client, rules: Arc<Mutex<Vec<Rule>>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let mut words = lines.next().unwrap().split(' ');
    let (method, uri) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let mut request = http::Request::builder().method(method.as_str()).uri(&uri);
    let mut length = 0;
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "accept" | "content-type" => request = request.header(name, value),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    let request = request.body(Body::from(body)).unwrap();
    let fault = fault(&rules, &method, &uri);
    let (status, body) = match fault {
        Some(Fault::Instead(status)) => (status, Vec::new()),
        fault => {
            let response = client.send(request).await.unwrap();
            let status = response.status().as_u16();
            let body = response.into_body().collect_bytes().await.unwrap().to_vec();
            match fault {
                Some(Fault::After(status)) => (status, Vec::new()),
                _ => (status, body),
            }
        }
    };
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(&[head.as_bytes(), &body].concat()).await;
    let _ = stream.shutdown().await;
}

fn fault(rules: &Mutex<Vec<Rule>>, method: &str, uri: &str) -> Option<Fault> {
    let mut rules = rules.lock().unwrap();
    let rule = rules
        .iter_mut()
        .find(|(one, part, _, left)| *one == method && uri.contains(part) && *left > 0)?;
    rule.3 -= 1;
    Some(rule.2)
}
