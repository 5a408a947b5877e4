{{- /* Who a controller of a node is. */ -}}
{{- define "csi-loopback.identity" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end -}}

{{- /* The controllers: one pod for the cluster, or with distributed.enabled in the driver's pod on each node. */ -}}
{{- define "csi-loopback.controllers" -}}
- args:
  - --csi-address=/csi/csi.sock
  - --feature-gates=Topology=true
  - --default-fstype=ext4
  - --timeout=10m
{{- if .Values.distributed.enabled }}
  - --node-deployment=true
  - --node-deployment-immediate-binding=false
  - --strict-topology=true
  - --enable-capacity=true
  - --capacity-ownerref-level=1
  env:
  {{- include "csi-loopback.identity" . | nindent 2 }}
{{- end }}
  image: {{ include "csi-loopback.sidecar" (list . "csi-provisioner" "v6.4.0") }}
  name: csi-provisioner
  {{- with index .Values.sidecarResources "csi-provisioner" }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop:
      - ALL
    readOnlyRootFilesystem: true
{{- if .Values.distributed.enabled }}
    runAsGroup: 65532
    runAsNonRoot: true
    runAsUser: 65532
{{- end }}
  volumeMounts:
  - mountPath: /csi
    name: socket
    readOnly: true
{{- if .Values.distributed.enabled }}
  - mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    name: api-access
    readOnly: true
{{- end }}
- args:
  - --csi-address=/csi/csi.sock
  - --timeout=10m
  - --resync-period=1m
{{- if .Values.distributed.enabled }}
  - --node-deployment=true
  env:
  {{- include "csi-loopback.identity" . | nindent 2 }}
{{- end }}
  image: {{ include "csi-loopback.sidecar" (list . "csi-snapshotter" "v8.7.0") }}
  name: csi-snapshotter
  {{- with index .Values.sidecarResources "csi-snapshotter" }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop:
      - ALL
    readOnlyRootFilesystem: true
{{- if .Values.distributed.enabled }}
    runAsGroup: 65532
    runAsNonRoot: true
    runAsUser: 65532
{{- end }}
  volumeMounts:
  - mountPath: /csi
    name: socket
    readOnly: true
{{- if .Values.distributed.enabled }}
  - mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    name: api-access
    readOnly: true
{{- end }}
- args:
  - --csi-address=/csi/csi.sock
  - --handle-volume-inuse-error=false
{{- if .Values.distributed.enabled }}
  - --leader-election=true
  env:
  {{- include "csi-loopback.identity" . | nindent 2 }}
{{- end }}
  image: {{ include "csi-loopback.sidecar" (list . "csi-resizer" "v2.3.0") }}
  name: csi-resizer
  {{- with index .Values.sidecarResources "csi-resizer" }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop:
      - ALL
    readOnlyRootFilesystem: true
{{- if .Values.distributed.enabled }}
    runAsGroup: 65532
    runAsNonRoot: true
    runAsUser: 65532
{{- end }}
  volumeMounts:
  - mountPath: /csi
    name: socket
    readOnly: true
{{- if .Values.distributed.enabled }}
  - mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    name: api-access
    readOnly: true
{{- end }}
{{- end -}}

{{- /* The sidecar for backup applications: in the driver's pod, or with distributed.enabled in pods of its own. */ -}}
{{- define "csi-loopback.metadata" -}}
- args:
  - --mode=sidecar
{{- if .Values.distributed.enabled }}
  - --driver-name=loopback.csi.local
  - --node-service=$(POD_NAMESPACE)/csi-loopback-nodes
  - --node-signer=loopback.csi.local/node
  - --node-account=$(POD_NAMESPACE)/csi-loopback-node-metadata
  - --front-account=$(POD_NAMESPACE)/csi-loopback-front
{{- else }}
  - --csi-address=/metadata/metadata.sock
{{- end }}
  - --port=50051
  - --http-endpoint=:8080
  - --audience=snapshot-metadata.loopback.csi.local
  - --session-api
{{- if not .Values.certManager.enabled }}
  - --self-signed
  - --self-signed-secret=csi-loopback-metadata-tls
{{- else }}
  - --tls-cert=/tls/tls.crt
  - --tls-key=/tls/tls.key
{{- end }}
  - --manage-service
  - --require-base-snapshot-for-delta=false
  - --service-address=csi-loopback-metadata.$(POD_NAMESPACE).svc:6443
  - --kube-api-qps=50
  - --kube-api-burst=100
  - --drain-timeout=20s
{{- if .Values.aggregatedApi.enabled }}
  - --cbt-http
  - --cbt-http-port=8443
  - --cbt-http-service-address=csi-loopback-cbt-http.$(POD_NAMESPACE).svc:443
{{- if not .Values.distributed.enabled }}
  - --cbt-http-lease=csi-loopback-cbt-http
{{- end }}
{{- end }}
  env:
  - name: POD_NAMESPACE
    valueFrom:
      fieldRef:
        fieldPath: metadata.namespace
  image: {{ include "csi-loopback.image" . }}
  {{- with .Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  livenessProbe:
    failureThreshold: 6
    initialDelaySeconds: 30
    periodSeconds: 10
    tcpSocket:
      port: health
  name: metadata
  ports:
  - containerPort: 50051
    name: metadata
  - containerPort: 8080
    name: health
{{- if .Values.aggregatedApi.enabled }}
  - containerPort: 8443
    name: cbt-http
{{- end }}
  readinessProbe:
    httpGet:
{{- if or .Values.distributed.enabled (not .Values.aggregatedApi.enabled) }}
      path: /health
{{- else }}
      path: /cbt-http/leader
{{- end }}
      port: health
    periodSeconds: 5
    timeoutSeconds: 5
  {{- with .Values.metadata.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop:
      - ALL
    readOnlyRootFilesystem: true
{{- if not .Values.distributed.enabled }}
    runAsGroup: 65533
    runAsNonRoot: true
    runAsUser: 65533
    seccompProfile:
      type: RuntimeDefault
  volumeMounts:
  - mountPath: /metadata
    name: metadata-socket
    readOnly: true
  - mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    name: api-access
    readOnly: true
{{- if .Values.certManager.enabled }}
  - mountPath: /tls
    name: certificate
    readOnly: true
{{- end }}
{{- end }}
{{- end -}}
