"""Inputs and labels for any class of transformers with a causal-LM head, as its documentation says they are given."""

import inspect

import torch
from families import VOCAB

LENGTH, FRAMES, SAMPLES = 12, 64, 4000


def batches(model):
    """Batches to try, by name: the first that the plain model trains on is the one to compare with."""
    special = _SPECIAL.get(type(model).__name__)
    if special is not None:
        return {"special": special(model)}
    text, labels = _text(model)
    image, speech = _image(model), _speech(model)
    return {
        "text": {**text, **labels, "attention_mask": _mask(text["input_ids"])},
        "text without a mask": {**text, **labels},
        "speech": {**speech, **labels},
        "speech, time last": {**speech, **labels, **{k: v.mT for k, v in speech.items() if v.ndim == 3}},
        "speech of images": {"input_features": _random(2, 3, 2, 8, 8), **labels},
        "image": {**image, **labels},
        "text and image": {**text, **image, **labels},
        "text and images of each row": {**text, **labels, "pixel_values": image["pixel_values"][:, None]},
    }


def _text(model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, VOCAB, (2, LENGTH), generator=generator)  # below are the tokens that stand for something
    labels = ids.clone()
    if _decodes(model):  # the target of another text, whose first token is predicted too
        labels = ids.flip(1)
    else:
        labels[:, :3] = -100
    labels[1, -2:] = -100
    return {"input_ids": ids}, {"labels": labels}


def _decodes(model):
    return model.config.is_encoder_decoder or hasattr(model, "decoder") and hasattr(model, "encoder")


def _mask(ids):
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return mask


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _configs(model):
    config = model.config
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [part for part in parts if part is not None] + [config]


def _first(model, names, default):
    found = (getattr(config, name, None) for name in names for config in _configs(model))
    return next((value for value in found if isinstance(value, int)), default)


def _speech(model):
    if "input_features" not in inspect.signature(type(model).forward).parameters:
        return {"input_values": _random(2, SAMPLES)}
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
    return {"input_features": _random(2, FRAMES, _first(model, names, 80))}


def _image(model):
    size = _first(model, ("image_size",), 64)
    return {"pixel_values": _random(2, 3, size, size)}


def _csm(model):
    """Two rows of text and three frames of speech; the first two frames of a row train only the backbone."""
    config = model.config
    (ids,), frames = _text(model)[0].values(), 3
    ids[:, 6 : 6 + frames], ids[:, 6 + frames] = config.audio_token_id, config.audio_eos_token_id
    labels = torch.where(ids == config.audio_token_id, ids, -100)
    labels[:, 6 + frames] = 0
    labels[0, 6:8] = -101
    samples = frames * model.codec_model.config.frame_size
    return {"input_ids": ids, "labels": labels, "input_values": _random(2, 1, samples),
            "input_values_cutoffs": torch.full((2, 1), samples)}  # fmt: skip


def _csm_depth(model):
    codes = torch.randint(3, 24, (5, model.config.num_codebooks), generator=torch.Generator().manual_seed(0))
    inputs = torch.nn.functional.pad(codes[:, :-1], (1, 0), value=0)
    return {"input_ids": inputs, "labels": codes, "backbone_last_hidden_state": _random(5, 64)}


def _kyutai(model):
    """Each position has a token of text and one of each codebook; labels are those of the text."""
    (ids,), labels = _text(model)[0].values(), _text(model)[1]
    codes = torch.randint(3, 20, (*ids.shape, model.config.num_codebooks), generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.cat([ids[..., None], codes], dim=-1), **labels}


def _higgs(model):
    """Text and two frames of speech, each with its labels."""
    config = model.config
    (ids,), labels = _text(model)[0].values(), _text(model)[1]
    ids[:, 5:7] = config.audio_token_id
    codes = torch.randint(3, 24, (2, 2, config.num_codebooks), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, **labels, "audio_input_ids": codes, "audio_labels": codes,
            "audio_input_ids_mask": torch.ones(2, 2, dtype=torch.bool)}  # fmt: skip


def _blip(model):
    """A text with a place for each of the image's query tokens."""
    text, labels = _text(model)
    queries = torch.full((2, model.config.num_query_tokens), model.config.image_token_id)
    ids = torch.cat([queries, text["input_ids"]], dim=1)
    ignored = torch.full_like(queries, -100)
    batch = {"input_ids": ids, "labels": torch.cat([ignored, labels["labels"]], dim=1), **_image(model)}
    if "qformer_input_ids" in inspect.signature(type(model).forward).parameters:
        batch["qformer_input_ids"] = text["input_ids"]
    return batch


def _patches(model):
    config = model.config.vision_config
    return {"flattened_patches": _random(2, 6, config.patch_embed_hidden_size + 2).abs(), **_text(model)[1]}


def _voxtral(model):
    text, labels = _text(model)
    ratio = model.config.audio_length_per_tok
    return {**text, **labels, "input_features": _random(2, model.config.audio_config.num_mel_bins, LENGTH * ratio)}


def _text_and_image(model):
    text, labels = _text(model)
    return {**text, **labels, **_image(model)}


def _question(model):
    """A question about an image; without its own ids the decoder would read the labels, -100 among them."""
    batch = _text_and_image(model)
    return {**batch, "decoder_input_ids": batch["input_ids"]}


def _blip_video(model):
    """A text with a place for each query token of each of two frames."""
    text, labels = _text(model)
    queries = torch.full((2, 2 * model.config.num_query_tokens), model.config.video_token_id)
    size = _first(model, ("image_size",), 64)
    return {
        "input_ids": torch.cat([queries, text["input_ids"]], dim=1), "qformer_input_ids": text["input_ids"],
        "labels": torch.cat([torch.full_like(queries, -100), labels["labels"]], dim=1),
        "pixel_values": _random(2, 2, 3, size, size),
    }  # fmt: skip


def _idefics(model):
    """One image for each row, which all its tokens see."""
    text, labels = _text(model)
    size = model.config.vision_config.image_size
    return {**text, **labels, "attention_mask": _mask(text["input_ids"]), "pixel_values": _random(2, 1, 3, size, size),
            "image_attention_mask": torch.ones(2, LENGTH, 1, dtype=torch.long)}  # fmt: skip


def _kosmos(model):
    """The first tokens of a row are the places of the image."""
    text, labels = _text(model)
    places = model.config.latent_query_num
    at = torch.zeros(2, LENGTH + places, dtype=torch.long)
    at[:, :places] = 1
    image = torch.full((2, places), 3)
    return {
        "input_ids": torch.cat([image, text["input_ids"]], 1), "image_embeds_position_mask": at, **_image(model),
        "labels": torch.cat([torch.full_like(image, -100), labels["labels"]], 1),
    }  # fmt: skip


def _musicgen(model):
    """A text, and frames of one code for each codebook."""
    decoder = model.config.decoder
    codes = torch.randint(3, 24, (2, 5, decoder.num_codebooks), generator=torch.Generator().manual_seed(0))
    return {"input_ids": _text(model)[0]["input_ids"], "labels": codes}


def _units(model):
    """Units of speech for the hidden states of a text's decoder."""
    return {"inputs_embeds": _random(2, LENGTH, model.config.hidden_size), **_text(model)[1]}


def _code_predictor(model):
    """The hidden state of the talker and a code of the first group; the label is the code of a later group."""
    labels = torch.randint(3, 24, (2, 2), generator=torch.Generator().manual_seed(0))
    return {"inputs_embeds": _random(2, 2, model.config.hidden_size), "labels": labels, "generation_steps": 0}


def _udop(model):
    """A text, the boxes of its tokens on the page, and the page."""
    text, labels = _text(model)
    low, size = _random(2, LENGTH, 2).sigmoid() / 2, _random(2, LENGTH, 2).sigmoid() / 2
    return {**text, **labels, **_image(model), "bbox": torch.cat([low, low + size], -1)}


def _dia(model):
    """A text; labels for each codebook of each frame, one behind another."""
    channels, frames = model.config.decoder_config.num_channels, 5
    codes = torch.randint(3, 24, (2, frames, channels), generator=torch.Generator().manual_seed(0))
    return {"input_ids": _text(model)[0]["input_ids"], "decoder_input_ids": codes,
            "labels": codes.transpose(1, 2).reshape(2 * channels, frames).contiguous()}  # fmt: skip


_SPECIAL = {
    "GitForCausalLM": _text_and_image,
    "BlipForQuestionAnswering": _question,
    "SpeechEncoderDecoderModel": lambda model: {"input_values": _random(2, SAMPLES), **_text(model)[1]},
    "DiaForConditionalGeneration": _dia,
    "IdeficsForVisionText2Text": _idefics,
    "InstructBlipVideoForConditionalGeneration": _blip_video,
    "Kosmos2ForConditionalGeneration": _kosmos,
    "MusicgenForConditionalGeneration": _musicgen,
    "MusicgenMelodyForConditionalGeneration": _musicgen,
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": _code_predictor,
    "SeamlessM4TTextToUnitForConditionalGeneration": _units,
    "UdopForConditionalGeneration": _udop,
    "CsmForConditionalGeneration": _csm,
    "CsmDepthDecoderForCausalLM": _csm_depth,
    "HiggsAudioV2ForConditionalGeneration": _higgs,
    "KyutaiSpeechToTextForConditionalGeneration": _kyutai,
    "Blip2ForConditionalGeneration": _blip,
    "InstructBlipForConditionalGeneration": _blip,
    "Pix2StructForConditionalGeneration": _patches,
    "VoxtralRealtimeForConditionalGeneration": _voxtral,
}
