{{/* What the pods of all workloads have in common. */}}

{{/* Fields of a pod: dict with root, account, priority (coordinator or worker), own: a group of values. */}}
{{- define "slipway.pod" -}}
{{- $own := .own | default dict -}}
serviceAccountName: {{ .account | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- $class := $own.priorityClassName | default (include "slipway.priorityClass" (list .root .priority)) }}
{{- if and $class (not .hook) }}
priorityClassName: {{ $class | quote }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{/* The priority class of a workload: list root kind. Empty for the cluster's default. */}}
{{- define "slipway.priorityClass" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- $named := get $root.Values.priorityClasses $kind -}}
{{- if $named -}}
{{- $named -}}
{{- else if $root.Values.priorityClasses.create -}}
{{- include "slipway.clusterName" $root }}-{{ $kind -}}
{{- end -}}
{{- end -}}

{{/* Pods of a Deployment rather on different nodes: list root labels. */}}
{{- define "slipway.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      {{- include "slipway.podSelector" . | nindent 6 }}
{{- end -}}

{{- define "slipway.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Variables of what reads and writes artifacts and shows a certificate. */}}
{{- define "slipway.env" -}}
{{- if .Values.store.existingSecret }}
- name: AWS_SHARED_CREDENTIALS_FILE
  value: {{ printf "/s3/%s" .Values.store.secretKey | quote }}
{{- end }}
- name: SLIPWAY_TLS_CA_FILE
  value: /tls/ca.crt
- name: SLIPWAY_TLS_CERT_FILE
  value: /tls/tls.crt
- name: SLIPWAY_TLS_KEY_FILE
  value: /tls/tls.key
{{- end -}}

{{- define "slipway.mounts" -}}
{{- if .Values.store.existingSecret }}
- name: s3
  mountPath: /s3
  readOnly: true
{{- end }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- end -}}

{{/* Volumes of these mounts: list root holder, the holder of the certificate. */}}
{{- define "slipway.volumes" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.store.existingSecret }}
- name: s3
  secret:
    secretName: {{ $root.Values.store.existingSecret | quote }}
    defaultMode: 288
{{- end }}
- name: tls
  secret:
    secretName: {{ include "slipway.tlsSecret" . | quote }}
    defaultMode: 288
{{- end -}}

{{- define "slipway.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- $holder := index . 1 -}}
{{- if eq $root.Values.tls.source "secrets" -}}
{{- get $root.Values.tls.secrets $holder -}}
{{- else -}}
{{- include "slipway.fullname" $root }}-{{ $holder }}-tls
{{- end -}}
{{- end -}}

{{/* The name in the certificate of a client. Another release's is another one, also where both have the same authority. */}}
{{- define "slipway.identity" -}}
{{- $root := index . 0 -}}
{{- printf "%s.%s.%s" (index . 1) (include "slipway.fullname" $root) $root.Release.Namespace -}}
{{- end -}}

{{/* Variables of the database. A file of libpq is read again for every connection; an address is read when the pod begins. */}}
{{- define "slipway.databaseEnv" -}}
{{- $database := .Values.database -}}
{{- if $database.urlKey }}
- name: SLIPWAY_STATE
  valueFrom:
    secretKeyRef:
      name: {{ $database.existingSecret | quote }}
      key: {{ $database.urlKey | quote }}
{{- else }}
- name: SLIPWAY_STATE
  value: postgresql:///slipway?service=slipway
- name: PGSERVICEFILE
  value: {{ printf "/state/%s" $database.serviceFileKey | quote }}
{{- end }}
{{- end -}}

{{/* Its Secret is mounted in both cases, for a certificate of its authority: sslrootcert=/state/ca.pem. */}}
{{- define "slipway.databaseVolume" -}}
- name: state
  secret:
    secretName: {{ .Values.database.existingSecret | quote }}
    defaultMode: 288
{{- end -}}

{{/* Annotations of a pod: dict with root, own, read: names of the ConfigMaps whose change replaces the pod. Those of the values count. */}}
{{- define "slipway.podAnnotations" -}}
{{- $data := list -}}
{{- range .read }}{{ $data = append $data (include (printf "slipway.data.%s" .) $.root) }}{{ end -}}
{{- $annotations := dict "checksum/settings" (join "\n--\n" $data | sha256sum) -}}
{{- if .root.Values.metrics.enabled -}}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" "9464") -}}
{{- end -}}
{{- toYaml (merge (dict) .own.podAnnotations $annotations) -}}
{{- end -}}

{{/* Settings from these ConfigMaps; the later one counts: list root names. */}}
{{- define "slipway.envFrom" -}}
envFrom:
  {{- $root := index . 0 }}
  {{- range index . 1 }}
  - configMapRef:
      name: {{ printf "%s-%s" (include "slipway.fullname" $root) . | quote }}
  {{- end }}
{{- end -}}
