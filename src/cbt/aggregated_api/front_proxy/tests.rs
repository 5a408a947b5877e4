use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};

use super::*;

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn chain(&self, names: &[&str], usage: ExtendedKeyUsagePurpose) -> ClientChain {
        self.chain_with(names, usage, |_| {})
    }

    fn chain_with(
        &self,
        names: &[&str],
        usage: ExtendedKeyUsagePurpose,
        change: impl FnOnce(&mut CertificateParams),
    ) -> ClientChain {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for name in names {
            params.distinguished_name.push(DnType::CommonName, *name);
        }
        params.extended_key_usages = vec![usage];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        ClientChain::shown(params.signed_by(&key, &self.0).unwrap().der().clone())
    }

    fn data(&self, names: &str) -> BTreeMap<String, String> {
        let entries = [
            ("requestheader-client-ca-file", self.0.pem()),
            ("requestheader-allowed-names", names.to_owned()),
            ("requestheader-username-headers", r#"["X-Remote-User"]"#.to_owned()),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#.to_owned()),
            ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#.to_owned()),
            ("requestheader-uid-headers", r#"["X-Remote-Uid"]"#.to_owned()),
        ];
        entries.map(|(key, value)| (key.to_owned(), value)).into()
    }
}

fn headers_of(entries: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in entries {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};

#[test]
fn only_the_front_proxys_certificate_is_accepted() {
    let (ours, other) = (Authority::new("ours"), Authority::new("ours"));
    let trust = Trust::read(&ours.data(r#"["front-proxy","second"]"#)).unwrap();
    let alice = headers_of(&[("x-remote-user", "alice")]);
    let user = |chain: &ClientChain| trust.authenticate(chain, &alice);
    for good in ["front-proxy", "second"] {
        let user = user(&ours.chain(&[good], ClientAuth)).unwrap();
        assert_eq!(user.username.as_deref(), Some("alice"));
    }
    let past = |params: &mut CertificateParams| {
        params.not_before = rcgen::date_time_ymd(2001, 1, 1);
        params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    };
    for (bad, what) in [
        (ClientChain::default(), "none"),
        (other.chain(&["front-proxy"], ClientAuth), "another authority"),
        (ours.chain(&["mallory"], ClientAuth), "another name"),
        (ours.chain(&[], ClientAuth), "no name"),
        (ours.chain(&["front-proxy"], ServerAuth), "server certificate"),
        (ours.chain_with(&["front-proxy"], ClientAuth, past), "expired"),
    ] {
        assert_eq!(user(&bad).expect_err(what).cause, Cause::Unauthenticated, "{what}");
    }
}

#[test]
fn an_empty_list_of_names_allows_any() {
    let ours = Authority::new("ours");
    let alice = headers_of(&[("x-remote-user", "alice")]);
    for names in ["[]", "", "null"] {
        let trust = Trust::read(&ours.data(names)).unwrap();
        assert!(trust.authenticate(&ours.chain(&["any-name"], ClientAuth), &alice).is_ok());
        assert!(trust.authenticate(&ours.chain(&[], ClientAuth), &alice).is_ok());
    }
}

#[test]
fn the_user_comes_from_the_headers() {
    let trust = Trust::read(&Authority::new("x").data("[]")).unwrap();
    let user = trust.user(&headers_of(&[
        ("x-remote-user", "alice"),
        ("x-remote-uid", "7"),
        ("x-remote-group", "a"),
        ("x-remote-group", "b"),
        ("x-remote-extra-acme.com%2fproject", "p"),
        ("x-remote-extra-acme.com%2fproject", "q"),
        ("x-remote-extra-", "nothing"),
    ]));
    let extra = [("acme.com/project".to_owned(), vec!["p".to_owned(), "q".to_owned()])];
    let expected = UserInfo {
        username: Some("alice".into()),
        uid: Some("7".into()),
        groups: Some(vec!["a".into(), "b".into()]),
        extra: Some(extra.into()),
    };
    assert_eq!(user, Some(expected));
    let mut garbled = headers_of(&[("x-remote-user", "alice")]);
    garbled.append("x-remote-group", HeaderValue::from_bytes(b"\xff").unwrap());
    for bad in [HeaderMap::new(), headers_of(&[("x-remote-user", "")]), garbled] {
        assert_eq!(trust.user(&bad), None);
    }
}

#[test]
fn without_a_valid_config_map_all_requests_are_refused() {
    let ours = Authority::new("ours");
    let map = |data| Some(Arc::new(ConfigMap { data: Some(data), ..ConfigMap::default() }));
    let mut known = Known::default();
    known.update(map(ours.data("[]")));
    assert!(known.trust.is_some());
    known.update(None);
    assert!(known.trust.is_none(), "the ConfigMap is deleted");
    for (key, value) in [
        ("requestheader-client-ca-file", "no PEM"),
        ("requestheader-allowed-names", "front-proxy"),
        ("requestheader-allowed-names", r#"[""]"#),
        ("requestheader-username-headers", "[]"),
        ("requestheader-username-headers", r#"["a b"]"#),
    ] {
        known.update(map(ours.data("[]")));
        assert!(known.trust.is_some());
        let mut data = ours.data("[]");
        data.insert(key.to_owned(), value.to_owned());
        let error = format!("{:#}", Trust::read(&data).unwrap_err());
        assert!(error.contains(key), "{error}");
        known.update(map(data));
        assert!(known.trust.is_none(), "{key}: {value}");
    }
}
