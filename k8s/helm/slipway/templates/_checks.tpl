{{/* What cannot work is refused before anything is made: all of it at once, each with what to do. */}}
{{- define "slipway.check" -}}
{{- $problems := concat
  (include "slipway.check.places" . | fromYamlArray)
  (include "slipway.check.workers" . | fromYamlArray)
  (include "slipway.check.outside" . | fromYamlArray)
  (include "slipway.check.variables" . | fromYamlArray) -}}
{{- with $problems }}
{{- fail (printf "%d invalid values:\n- %s" (len .) (join "\n- " .)) }}
{{- end }}
{{- end -}}

{{- define "slipway.check.places" -}}
{{- $problems := list -}}
{{- $fullname := include "slipway.fullname" . -}}
{{- if or (gt (len $fullname) 36) (not (regexMatch "^[a-z]" $fullname)) }}{{ $problems = append $problems (printf "the name %s has more than 36 characters, or begins with a digit: set fullnameOverride to another one" $fullname) }}{{ end -}}
{{- with .Values.store -}}
{{- if not .bucket }}{{ $problems = append $problems "no bucket for artifacts: set store.bucket, and store.endpoint if it is not AWS's" }}{{ end -}}
{{- if and .existingSecret .workloadIdentity }}{{ $problems = append $problems "store.existingSecret and store.workloadIdentity are both set, and keys would count: set one of them" }}{{ end -}}
{{- if not (or .existingSecret .workloadIdentity) }}{{ $problems = append $problems "nothing gives access to the bucket: set store.existingSecret to a Secret with keys, or store.workloadIdentity to true if service accounts have a role" }}{{ end -}}
{{- end -}}
{{- if not .Values.database.existingSecret }}{{ $problems = append $problems "no database: set database.existingSecret to a Secret that says where PostgreSQL is" }}{{ end -}}
{{- if eq .Values.tls.source "secrets" -}}
{{- $needed := list "coordinator" "worker" -}}
{{- if .Values.cleanup.enabled }}{{ $needed = append $needed "cleanup" }}{{ end -}}
{{- if .Values.keda.enabled }}{{ $needed = append $needed "keda" }}{{ end -}}
{{- range $needed -}}
{{- if not (get $.Values.tls.secrets .) }}{{ $problems = append $problems (printf "tls.source is secrets, and there is none for %s: set tls.secrets.%s, or tls.source to cert-manager" . .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.access.existingSecret (or .Values.access.principals .Values.access.issuers .Values.access.projects) }}{{ $problems = append $problems "access.principals, access.issuers and access.projects would not be read beside access.existingSecret: put them into that Secret" }}{{ end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "slipway.check.workers" -}}
{{- $problems := list -}}
{{- $table := include "slipway.table" . | fromYaml -}}
{{- $names := keys $table | sortAlpha -}}
{{- $cuda := list -}}
{{- range $names }}{{ if (get $table .).cuda }}{{ $cuda = append $cuda . }}{{ end }}{{ end -}}
{{- $images := append $names "coordinator" -}}
{{- range $cuda }}{{ $images = append $images (printf "%s-cuda" .) }}{{ end -}}
{{- $sizes := keys (include "slipway.sizes" . | fromYaml) | sortAlpha -}}
{{- if and .Values.size (not (has .Values.size $sizes)) }}{{ $problems = append $problems (printf "size: %q is none of %s" .Values.size (join ", " $sizes)) }}{{ end -}}
{{- range $key, $value := .Values.image.digests -}}
{{- if not (has $key $images) }}{{ $problems = append $problems (printf "image.digests.%s: there is no such image; there are %s" $key (join ", " $images)) }}{{ end -}}
{{- end -}}
{{- if and .Values.engine .Values.keda.enabled }}{{ $problems = append $problems "keda.enabled scales workers, and with engine there are none: set keda.enabled to false" }}{{ end -}}
{{- $all := dict -}}
{{- range $name, $own := .Values.workers -}}
{{- if has $name $names }}{{ $_ := set $all (printf "workers.%s" $name) (dict "own" $own "service" $name) -}}
{{- else }}{{ $problems = append $problems (printf "workers.%s: there is no such worker; there are %s" $name (join ", " $names)) }}{{ end -}}
{{- end -}}
{{- range $name, $own := .Values.pools -}}
{{- if has $name $names }}{{ $problems = append $problems (printf "pools.%s has the name of a worker: give it another one, such as %s-2" $name $name) }}{{ end -}}
{{- if has $name (list "coordinator" "cleanup" "migrate") }}{{ $problems = append $problems (printf "pools.%s has the name of another process of the chart: give it another one, such as %s-2" $name $name) }}{{ end -}}
{{- if has $own.worker $names }}{{ $_ := set $all (printf "pools.%s" $name) (dict "own" $own "service" $own.worker) -}}
{{- else }}{{ $problems = append $problems (printf "pools.%s.worker: there is no worker %q; there are %s" $name $own.worker (join ", " $names)) }}{{ end -}}
{{- end -}}
{{- range $key, $one := $all -}}
{{- if and $one.own.gpu (not (has $one.service $cuda)) }}{{ $problems = append $problems (printf "%s.gpu: %s has no image for GPUs; those with one are %s" $key $one.service (join ", " $cuda)) }}{{ end -}}
{{- if and $.Values.keda.enabled (hasKey $one.own "replicas") }}{{ $problems = append $problems (printf "%s.replicas is for workers that KEDA does not scale: set %s.scale, or keda.enabled to false" $key $key) }}{{ end -}}
{{- end -}}
{{- if not $problems -}}
{{- range $names }}{{ if not (hasKey $.Values.workers .) }}{{ $_ := set $all (printf "workers.%s" .) (dict "own" dict "service" .) }}{{ end }}{{ end -}}
{{- range $key, $one := $all -}}
{{- $worker := include "slipway.worker" (dict "root" $ "service" $one.service "row" (get $table $one.service) "own" (omit $one.own "worker")) | fromYaml -}}
{{- $problems = concat $problems (include "slipway.check.worker" (list $key $worker) | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}

{{/* One worker as it will be: list key worker. */}}
{{- define "slipway.check.worker" -}}
{{- $problems := list -}}
{{- $key := index . 0 -}}
{{- $worker := index . 1 -}}
{{- with $worker.resources -}}
{{- $request := include "slipway.mebibytes" .requests.memory | int64 -}}
{{- $limit := include "slipway.mebibytes" .limits.memory | int64 -}}
{{- if and $limit (gt $request $limit) }}{{ $problems = append $problems (printf "%s.resources: requests.memory %s is more than limits.memory %s: raise limits.memory too" $key .requests.memory .limits.memory) }}{{ end -}}
{{- end -}}
{{- if gt (int $worker.scale.min) (int $worker.scale.max) }}{{ $problems = append $problems (printf "%s.scale: min %d is more than max %d: raise max too" $key (int $worker.scale.min) (int $worker.scale.max)) }}{{ end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "slipway.check.outside" -}}
{{- $problems := list -}}
{{- $ways := list -}}
{{- if .Values.ingress.enabled }}{{ $ways = append $ways "ingress" }}{{ end -}}
{{- if .Values.gateway.enabled }}{{ $ways = append $ways "gateway" }}{{ end -}}
{{- if .Values.http.ingress.enabled }}{{ $ways = append $ways "http.ingress" }}{{ end -}}
{{- if .Values.http.gateway.enabled }}{{ $ways = append $ways "http.gateway" }}{{ end -}}
{{- if ne .Values.clients.service.type "ClusterIP" }}{{ $ways = append $ways "clients.service" }}{{ end -}}
{{- if and $ways .Values.networkPolicies.enabled (not .Values.clients.from) }}{{ $problems = append $problems (printf "%s is set, and the network policies let nobody in from outside: name the controller's pods, or the clients' addresses, in clients.from" (join " and " $ways)) }}{{ end -}}
{{- range $key, $way := dict "ingress" .Values.ingress "http.ingress" .Values.http.ingress -}}
{{- if and $way.enabled (not $way.host) }}{{ $problems = append $problems (printf "%s.enabled needs a name: set %s.host" $key $key) }}{{ end -}}
{{- end -}}
{{- range $key, $way := dict "gateway" .Values.gateway "http.gateway" .Values.http.gateway -}}
{{- if and $way.enabled (not $way.parentRefs) }}{{ $problems = append $problems (printf "%s.enabled needs a Gateway: name it in %s.parentRefs" $key $key) }}{{ end -}}
{{- end -}}
{{- with .Values.gateway.backendTls -}}
{{- if and (or $.Values.gateway.enabled $.Values.http.gateway.enabled) .enabled (not .authority.name) }}{{ $problems = append $problems "the coordinator speaks TLS alone: name a ConfigMap with its authority as ca.crt in gateway.backendTls.authority.name, or set gateway.backendTls.enabled to false if the gateway is told in another way" }}{{ end -}}
{{- end -}}
{{- toYaml (concat $problems (include "slipway.check.http" . | fromYamlArray)) -}}
{{- end -}}

{{- define "slipway.check.http" -}}
{{- $problems := list -}}
{{- $http := .Values.http -}}
{{- if and (or $http.ingress.enabled $http.gateway.enabled) (not $http.enabled) }}{{ $problems = append $problems "http.ingress or http.gateway is set, and no coordinator has a port for HTTP: set http.enabled to true" }}{{ end -}}
{{- if and $http.enabled (has (int $http.port) (list 7070 7071 7072 9464)) }}{{ $problems = append $problems (printf "http.port: coordinators have another port %d: set it to one that is free, such as 7080" (int $http.port)) }}{{ end -}}
{{- with .Values.ingress -}}
{{- if and .enabled $http.ingress.enabled .host (eq .host $http.ingress.host) }}{{ $problems = append $problems (printf "ingress.host and http.ingress.host are both %s, and each takes all of its paths: give them different names" .host) }}{{ end -}}
{{- end -}}
{{- with .Values.gateway -}}
{{- $shared := false -}}
{{- range $hostname := .hostnames }}{{ if has $hostname $http.gateway.hostnames }}{{ $shared = true }}{{ end }}{{ end -}}
{{- if not (and .hostnames $http.gateway.hostnames) }}{{ $shared = true }}{{ end -}}
{{- if and .enabled $http.gateway.enabled $shared (eq (toJson .parentRefs) (toJson $http.gateway.parentRefs)) }}{{ $problems = append $problems "gateway and http.gateway have a name in common at the same listener, where one route would be refused: give them different hostnames, or a sectionName of the Gateway each" }}{{ end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "slipway.check.variables" -}}
{{- $problems := list -}}
{{- $chart := dict "SLIPWAY_KUBERNETES_INSTANCE" "engine" "SLIPWAY_STORE" "store.bucket" "AWS_REGION" "store.region" "AWS_ENDPOINT_URL_S3" "store.endpoint" "SLIPWAY_TRACING" "telemetry.endpoint" "OTEL_EXPORTER_OTLP_ENDPOINT" "telemetry.endpoint" "SLIPWAY_IMPORT_FROM" "import.from" "AWS_SHARED_CREDENTIALS_FILE" "store.secretKey" "SLIPWAY_STATE" "database" "PGSERVICEFILE" "database" "SLIPWAY_CACHE_SIZE" "volume.size of the worker" "SLIPWAY_ACCESS_FILE" "access" "SLIPWAY_TLS_CA_FILE" "tls" "SLIPWAY_TLS_CERT_FILE" "tls" "SLIPWAY_TLS_KEY_FILE" "tls" -}}
{{- $fixed := list "HOME" "SLIPWAY_HOME" "SLIPWAY_SCRATCH" "POD_IP" -}}
{{- $collector := .Values.telemetry.endpoint -}}
{{- $logs := "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT" -}}
{{- $secret := "(SECRET|PASSWORD|TOKEN|ACCESS_KEY|CREDENTIAL)" -}}
{{- $given := dict "settings" .Values.settings "coordinator.settings" .Values.coordinator.settings "worker.settings" .Values.worker.settings -}}
{{- $lists := dict "coordinator.env" .Values.coordinator.env "cleanup.env" .Values.cleanup.env "worker.env" .Values.worker.env -}}
{{- range $name, $own := .Values.workers }}{{ $_ := set $lists (printf "workers.%s.env" $name) ($own.env | default list) }}{{ end -}}
{{- range $name, $own := .Values.pools }}{{ $_ := set $lists (printf "pools.%s.env" $name) ($own.env | default list) }}{{ end -}}
{{- range $key, $variables := $lists -}}
{{- $literal := dict -}}
{{- range $variables -}}
{{- if hasKey $literal .name }}{{ $problems = append $problems (printf "%s has %s twice: remove one" $key .name) }}{{ end -}}
{{- $_ := set $literal .name (not (hasKey . "valueFrom")) -}}
{{- end -}}
{{- $_ := set $given $key $literal -}}
{{- end -}}
{{- range $key, $variables := $given -}}
{{- range $name, $value := $variables -}}
{{- if hasKey $chart $name }}{{ $problems = append $problems (printf "%s.%s is the chart's own: set %s" $key $name (get $chart $name)) }}{{ end -}}
{{- if has $name $fixed }}{{ $problems = append $problems (printf "%s.%s is the chart's own, and fixed: remove it" $key $name) }}{{ end -}}
{{- if and (eq $name "SLIPWAY_AUDIT") $value (not $collector) (not (hasKey $variables $logs)) (not (hasKey $.Values.settings $logs)) }}{{ $problems = append $problems (printf "%s.SLIPWAY_AUDIT is set, and there is no collector: set telemetry.endpoint, or %s beside it" $key $logs) }}{{ end -}}
{{- if and $value (regexMatch $secret $name) (not (hasSuffix "_FILE" $name)) (not (hasKey $chart $name)) }}{{ $problems = append $problems (printf "%s.%s would be written out for everybody to read: take it from a Secret, with valueFrom of env" $key $name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}
