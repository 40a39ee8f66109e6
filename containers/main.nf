// From slides to a report:   nextflow run containers/main.nf --slides slides.csv --config my.yaml --study /data/study
// Stores and the run lie in `study` and not in Nextflow's work folder, so that a process that is run again continues.
params.study = "study"

process preprocess {
    cpus 8
    input:
    path slides
    output:
    val true
    script:
    "wsi-train preprocess ${slides} ${file(params.study)}/stores --workers ${task.cpus}"
}

process fit {
    accelerator 1
    input:
    val stored
    path slides
    path config
    output:
    val true
    script:
    """
    wsi-train fit --config ${config} --data.manifest ${slides} --data.stores ${file(params.study)}/stores \
        --out ${file(params.study)}/run --resume last
    """
}

process report {
    input:
    val fitted
    script:
    "wsi-train heatmap ${file(params.study)}/run && wsi-train report ${file(params.study)}/run"
}

workflow {
    slides = file(params.slides, checkIfExists: true)
    report(fit(preprocess(slides), slides, file(params.config, checkIfExists: true)))
}
