# shellcheck shell=bash disable=SC2154
# Certificates and kubeconfigs of a cluster for tests.
# Sourced, never run; the script that sources it sets $pki, the directory of keys and certificates.

make_ca() { # make_ca NAME
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -keyout "$pki/$1.key" -out "$pki/$1.crt" -subj "/CN=$1"
}

make_certificate() { # make_certificate NAME CA SUBJECT USAGE [NAMES]
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 30 \
        -CA "$pki/$2.crt" -CAkey "$pki/$2.key" -keyout "$pki/$1.key" -out "$pki/$1.crt" -subj "$3" \
        -addext "basicConstraints=critical,CA:FALSE" -addext "extendedKeyUsage=$4" \
        ${5:+-addext "subjectAltName=$5"}
}

write_kubeconfig() { # write_kubeconfig FILE SERVER CERTIFICATE
    cat >"$1" <<END
apiVersion: v1
kind: Config
clusters:
- name: local
  cluster:
    server: $2
    certificate-authority-data: $(base64 -w0 <"$pki/ca.crt")
users:
- name: local
  user:
    client-certificate-data: $(base64 -w0 <"$pki/$3.crt")
    client-key-data: $(base64 -w0 <"$pki/$3.key")
contexts:
- name: local
  context: {cluster: local, user: local}
current-context: local
END
}
