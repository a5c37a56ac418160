{{/* The place of artifacts. Its cleanup removes what this release's coordinator does not know, so by default no other release has it. */}}
{{- define "slipway.store" -}}
{{- $folder := .Values.store.prefix | default (printf "%s/%s" .Release.Namespace (include "slipway.fullname" .)) -}}
{{- printf "s3://%s" (list .Values.store.bucket (trimAll "/" $folder) | compact | join "/") -}}
{{- end -}}

{{/* Data of each ConfigMap, of which pods that read it have a checksum. */}}
{{- define "slipway.data.settings" -}}
SLIPWAY_STORE: {{ include "slipway.store" . | quote }}
AWS_REGION: {{ .Values.store.region | quote }}
{{- with .Values.store.endpoint }}
AWS_ENDPOINT_URL_S3: {{ . | quote }}
{{- end }}
{{- with .Values.settings }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "slipway.data.tracing" -}}
{{- with .Values.telemetry.endpoint -}}
SLIPWAY_TRACING: otlp
OTEL_EXPORTER_OTLP_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "slipway.data.coordinator-settings" -}}
{{- with .Values.coordinator.settings }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "slipway.data.worker-settings" -}}
{{- with .Values.worker.settings }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "slipway.data.import-settings" -}}
{{- with .Values.import.from -}}
SLIPWAY_IMPORT_FROM: {{ join " " . | quote }}
{{- end }}
{{- end -}}

{{/* Names of the ConfigMaps of a process: list root kind imports. */}}
{{- define "slipway.read" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.telemetry.endpoint }}
- tracing
{{- end }}
- settings
- {{ index . 1 }}-settings
{{- if and (index . 2) $root.Values.import.from }}
- import-settings
{{- end }}
{{- end -}}
