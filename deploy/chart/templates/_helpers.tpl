{{- /* The image csi-loopback: by digest if there is one. */ -}}
{{- define "csi-loopback.image" -}}
{{- $image := .Values.image -}}
{{- printf "%s:%s%s" $image.repository (default .Chart.AppVersion $image.tag) (ternary "" (printf "@%s" $image.digest) (empty $image.digest)) | quote -}}
{{- end -}}

{{- /* list ROOT NAME TAG: an image of the Kubernetes project. */ -}}
{{- define "csi-loopback.sidecar" -}}
{{- $values := (index . 0).Values -}}
{{- $digest := index $values.sidecarDigests (index . 1) -}}
{{- printf "%s/%s:%s%s" $values.sidecarRegistry (index . 1) (index . 2) (ternary "" (printf "@%s" $digest) (empty $digest)) | quote -}}
{{- end -}}

{{- /* list ROOT COMPONENT: where the pods of a component run, and how their images are pulled. */ -}}
{{- define "csi-loopback.pod" -}}
{{- $component := index . 1 -}}
{{- with (index . 0).Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Egress of all pods but the driver for inline volumes: DNS (also a node-local cache, and OpenShift's) and API servers. */ -}}
{{- define "csi-loopback.egress" -}}
- to:
  - namespaceSelector:
      matchLabels:
        kubernetes.io/metadata.name: kube-system
  - ipBlock:
      cidr: 169.254.20.10/32
  ports:
  - port: 53
    protocol: UDP
  - port: 53
    protocol: TCP
- to:
  - namespaceSelector:
      matchLabels:
        kubernetes.io/metadata.name: openshift-dns
  ports:
  - port: 5353
    protocol: UDP
  - port: 5353
    protocol: TCP
- ports:
  - port: 443
  - port: 6443
  - port: 8443
  - port: 16443
{{- end -}}
