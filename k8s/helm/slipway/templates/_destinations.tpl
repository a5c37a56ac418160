{{/* Where policies let pods go: rules of egress. */}}

{{- define "slipway.toNames" -}}
- to:
    {{- with .Values.networkPolicies.dns.to }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
      podSelector:
        matchLabels:
          k8s-app: kube-dns
    {{- end }}
  ports:
    - {port: {{ int .Values.networkPolicies.dns.port }}, protocol: UDP}
    - {port: {{ int .Values.networkPolicies.dns.port }}, protocol: TCP}
{{- end -}}

{{- define "slipway.toDatabase" -}}
- to:
    {{- with .Values.networkPolicies.database.to }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    - namespaceSelector: {}
      podSelector:
        matchLabels:
          app.kubernetes.io/name: postgresql
    {{- end }}
  ports:
    - {port: {{ int .Values.networkPolicies.database.port }}, protocol: TCP}
{{- end -}}

{{/* Not empty if service accounts have a role by IRSA, whose annotation EKS requires; Pod Identity has none. */}}
{{- define "slipway.irsa" -}}
{{- if contains "\"eks.amazonaws.com/role-arn\":" (toJson .Values) }}true{{ end -}}
{{- end -}}

{{/* Every public address, and none inside. */}}
{{- define "slipway.public" -}}
- ipBlock:
    cidr: 0.0.0.0/0
    except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]
- ipBlock:
    cidr: ::/0
    except: [fc00::/7, fe80::/10]
{{- end -}}

{{/* To a URL: dict with url and to, which counts instead where there is any. The namespace of a Service, or every public address. */}}
{{- define "slipway.toUrl" -}}
{{- $parts := urlParse .url -}}
{{- $host := regexReplaceAll ":[0-9]+$" $parts.host "" -}}
{{- $port := regexFind ":[0-9]+$" $parts.host | trimPrefix ":" | default (ternary "80" "443" (eq $parts.scheme "http")) -}}
- to:
    {{- if .to }}
    {{- toYaml .to | nindent 4 }}
    {{- else if regexMatch "^[^.]+\\.[^.]+\\.svc(\\.|$)" $host }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ index (splitList "." $host) 1 | quote }}
    {{- else }}
    {{- include "slipway.public" . | nindent 4 }}
    {{- end }}
  ports:
    - {port: {{ $port }}, protocol: TCP}
{{- end -}}
