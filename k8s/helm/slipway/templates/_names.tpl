{{/* Names and labels. Every object's name begins with this one, so that two releases share none. */}}
{{- define "slipway.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "slipway" .Release.Name -}}
{{- .Release.Name | replace "." "-" -}}
{{- else -}}
{{- printf "%s-slipway" .Release.Name | replace "." "-" -}}
{{- end -}}
{{- end -}}

{{/* Objects of the cluster have the namespace in their names too; no namespace has a dot in it, so no two pairs give the same. */}}
{{- define "slipway.clusterName" -}}
{{- printf "%s.%s" .Release.Namespace (include "slipway.fullname" .) -}}
{{- end -}}

{{- define "slipway.coordinator" -}}
{{- include "slipway.fullname" . }}-coordinator:7070
{{- end -}}

{{/* Labels that select the pods of this release. Nothing in them changes with a version: a selector cannot be changed. */}}
{{- define "slipway.selector" -}}
app.kubernetes.io/name: slipway
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* As the function above, with labels of the pods that are meant: list root labels. */}}
{{- define "slipway.podSelector" -}}
matchLabels:
  {{- include "slipway.selector" (index . 0) | nindent 2 }}
  {{- with index . 1 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* metadata: of a dict with root, name, and maybe labels, annotations, and cluster for an object outside of namespaces. */}}
{{- define "slipway.metadata" -}}
metadata:
  name: {{ .name | quote }}
  {{- if not .cluster }}
  namespace: {{ .root.Release.Namespace | quote }}
  {{- end }}
  labels:
    helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | quote }}
    app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
    app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
    app.kubernetes.io/part-of: slipway
    {{- include "slipway.selector" .root | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* A service account: dict with root, name, and maybe labels and own, which is the serviceAccount of a group of values. */}}
{{- define "slipway.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
{{- $all := .root.Values.serviceAccounts }}
{{- $own := .own | default dict }}
{{- $labels := merge (dict) (.labels | default dict) ($own.labels | default dict) $all.labels }}
{{- $annotations := merge (dict) ($own.annotations | default dict) $all.annotations }}
{{ include "slipway.metadata" (dict "root" .root "name" .name "labels" $labels "annotations" $annotations) }}
{{- include "slipway.pullSecrets" .root }}
automountServiceAccountToken: false
{{- end -}}

{{- define "slipway.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The image of a service: dict with root, service, and cuda for its image for GPUs. */}}
{{- define "slipway.image" -}}
{{- $image := .root.Values.image -}}
{{- $place := printf "%s-%s" $image.repository .service -}}
{{- if $image.registry }}{{ $place = printf "%s/%s" (trimSuffix "/" $image.registry) $place }}{{ end -}}
{{- $tag := default .root.Chart.AppVersion $image.tag -}}
{{- $key := .service -}}
{{- if .cuda }}{{ $tag = printf "%s-cuda" $tag }}{{ $key = printf "%s-cuda" $key }}{{ end -}}
{{- $digest := get $image.digests $key -}}
{{- $place }}:{{ $tag }}{{ if $digest }}@{{ $digest }}{{ end -}}
{{- end -}}
