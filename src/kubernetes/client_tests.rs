use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A server that answers every request with 429, and counts them.
async fn overloaded_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let count = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            counted.fetch_add(1, Ordering::SeqCst);
            let answer = "HTTP/1.1 429 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    (url, count)
}

#[tokio::test]
async fn repeated_calls_count_against_the_rate() {
    crate::tls::install_provider();
    let (url, count) = overloaded_server().await;
    let client = build(Config::new(url.parse().unwrap()), Rate { per_second: 2.0, burst: 1 });
    let api: Api<Namespace> = Api::all(client.unwrap());
    // Without the limit, eight attempts take 0.7 s.
    let refused = within(Duration::from_millis(1200), api.get("a")).await;
    assert!(refused.is_err());
    let attempts = count.load(Ordering::SeqCst);
    assert!((2..=4).contains(&attempts), "{attempts}");
}

#[tokio::test]
async fn a_burst_passes_at_once_and_then_the_rate_applies() {
    let throttle = Throttle::new(Rate { per_second: 10.0, burst: 3 });
    let now = Instant::now();
    let waits: Vec<_> = (0..5).map(|_| (throttle.book(now).unwrap() - now).as_millis()).collect();
    assert_eq!(waits, [0, 0, 0, 100, 200]);
    // After a pause the burst is available again, but not more.
    let later = now + Duration::from_secs(60);
    let waits: Vec<_> =
        (0..4).map(|_| (throttle.book(later).unwrap() - later).as_millis()).collect();
    assert_eq!(waits, [0, 0, 0, 100]);
}

#[tokio::test]
async fn rejected_calls_take_no_turn() {
    let throttle = Throttle::new(Rate { per_second: 10.0, burst: 1 });
    let now = Instant::now();
    let accepted = (0..10_000).filter(|_| throttle.book(now).is_ok()).count();
    assert_eq!(accepted, 101, "the calls that fit into the longest wait");
    let later = now + LONGEST_WAIT + Duration::from_secs(1);
    assert_eq!(throttle.book(later).unwrap(), later);
}

#[tokio::test]
async fn calls_that_are_given_up_use_no_turn() {
    // Two calls fit into the longest wait.
    let throttle = Throttle::new(Rate { per_second: 0.2, burst: 1 });
    let service = tower::service_fn(async |_: Request<()>| Ok::<_, BoxError>(()));
    let mut service = throttle.layer(service);
    let call = || Request::get("/api/v1/pods").body(()).unwrap();
    service.call(call()).await.unwrap();
    for _ in 0..100 {
        let waiting = service.call(call());
        assert!(timeout(Duration::ZERO, waiting).await.is_err());
    }
    assert!(throttle.book(Instant::now()).is_ok());
}

/// Reads the head of a request.
async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test]
async fn calls_go_through_the_proxy_of_the_kubeconfig() {
    crate::tls::install_provider();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let proxy = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let connect = head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let request = head(&mut stream).await;
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        stream.write_all(answer).await.unwrap();
        (connect, request)
    });
    let kubeconfig = Kubeconfig::from_yaml(&format!(
        "current-context: c\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{server: 'http://api.corp:8080', proxy-url: 'http://us%40er:pass@127.0.0.1:{port}'}}}}]\n\
         users: [{{name: u, user: {{token: t}}}}]\n"
    ));
    let config = load(kubeconfig.unwrap()).await.unwrap();
    let client = build(config, Rate { per_second: 10.0, burst: 3 }).unwrap();
    let request = Request::get("/healthz").body(Vec::new()).unwrap();
    assert_eq!(client.request_text(request).await.unwrap(), "ok");
    let (connect, request) = proxy.await.unwrap();
    assert!(connect.starts_with("CONNECT api.corp:8080 HTTP/1.1\r\n"), "{connect}");
    let connect = connect.to_ascii_lowercase();
    assert!(connect.contains("proxy-authorization: basic dxna"), "{connect}");
    assert!(request.starts_with("GET /healthz HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("Bearer t"), "{request}");
}

#[test]
fn watches_are_neither_delayed_nor_retried() {
    let request = |uri: &str| Request::get(uri).body(()).unwrap();
    assert!(is_watch(&request("/api/v1/pods?&watch=true&timeoutSeconds=20")));
    assert!(!is_watch(&request("/api/v1/pods?limit=25")));
    assert!(!is_watch(&request("/api/v1/pods/watch=true")));
    let watch = Request::get("/api/v1/pods?watch=true").body(Body::from(Vec::new())).unwrap();
    let list = Request::get("/api/v1/pods").body(Body::from(Vec::new())).unwrap();
    let mut retries = Retries::default();
    let mut again = |request| {
        Policy::<Request<Body>, Response<Body>, BoxError>::clone_request(&mut retries, request)
    };
    assert!(again(&watch).is_none() && again(&list).is_some());
}
